"""The plug-in in the process of the tests, which starts engines of its own afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import values

from epd_portable import envs


@pytest.fixture(scope="module", autouse=True)
def no_engine_counts_where_this_process_does() -> Iterator[None]:
    """Undo what the plug-in tells its children by the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "ValueClass", values.ValueClass)
        for name in ("PROMETHEUS_MULTIPROC_DIR", envs.EPD_METRICS_DIR.name):
            patch.setenv(name, "")
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def config() -> Any:
    """vLLM's configuration of a front."""
    from tests.integration.front.played_front import config_of_front

    return config_of_front()
