"""The launcher of a topology of small engines, forked as `tests.forked` forks it: points are armed
in it and in all that is forked from it.
"""

from __future__ import annotations

import os

import sitecustomize  # Of the folder `hooks`, which the nursery had on its PYTHONPATH.

from tests.integration.launch import run_plan

if __name__ == "__main__":
    sitecustomize.install()
    if os.environ.get("EPD_TEST_CLOCK"):
        sitecustomize.let_the_wall_clock_jump()
    run_plan.main()
