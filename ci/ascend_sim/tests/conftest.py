"""Tests of the simulated runtime itself, in ``.venv-npu-sim``; none of them runs the package."""

from __future__ import annotations

import ascend_sim  # noqa: F401 - only the environment made for these tests has it
