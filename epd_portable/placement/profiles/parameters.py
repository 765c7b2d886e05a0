"""Parameters of built-in types of plug-ins, checked as strictly as the rest of a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Part = Annotated[float, Field(ge=0, le=1, strict=False)]
Name = Annotated[str, Field(min_length=1)]
_OF_LLMD = """
algorithm autoTune encodedEndpointHeaderConfig evictionSweepSeconds evictionTtlSeconds headerName
inFlightLoadProducerName indexerConfig kvEventsConfig latencyPredictionInfoProducerName
maxNumOfEndpoints maxTokensInFlightPenalty missThreshold nonTextTokenWeight
prefillCalibrationFile prefillCalibrationFingerprint prefillCalibrationRequired
prefixMatchInfoProducerName prefixPluginName prefixPluginType primaryPort profileName
requestTimeout reusableTokensProducerName sessionIdConfig speculativeIndexing strategy
tokenProcessorConfig
"""
WITHOUT_EFFECT = frozenset(_OF_LLMD.split())
"""Parameters of llm-d's types that are taken, and have no effect here."""


class Parameters(BaseModel):
    """Base of built-in types: their fields are their parameters, and unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def ignored(self, given: Iterable[str]) -> list[str]:
        """Return which of the parameters that it was made with have no effect."""
        return sorted(set(given).difference(type(self).model_fields))
