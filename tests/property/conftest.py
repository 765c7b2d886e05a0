"""The profile of hypothesis that tries more; see `budget`."""

from __future__ import annotations

from hypothesis import settings

from tests.integration.conftest import (
    no_engine_counts_where_this_process_does,  # noqa: F401 - vLLM's schedulers load the plug-in
)

settings.register_profile("thorough", print_blob=True)
