"""Encode, prefill and decode in separate instances of vLLM, on CUDA, Ascend and CPU."""

from __future__ import annotations

import sys

__version__ = "0.1.0"

# `python -m epd_portable...` puts the working directory in front of everything that is imported
# next, and a process that can write there would run with us. `sys.argv` begins so while Python
# looks for the module, whose name stands in its place in `sys.orig_argv`.
if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].removeprefix("-m").startswith("epd_portable")
    and not (sys.flags.isolated or sys.flags.safe_path)
):
    del sys.path[0]
