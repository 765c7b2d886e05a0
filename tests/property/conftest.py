"""The profile of hypothesis that tries more; see `budget`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("thorough", print_blob=True)
