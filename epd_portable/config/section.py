"""What every section of the topology file is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are refused, and nothing is taken for what it is not."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
