"""``python -m tests.checkpoints NAME FOLDER`` writes one checkpoint.

In a process of its own, because what it imports takes a gigabyte of memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from epd_portable.platforms import torchvision_guard

torchvision_guard.install()

from tests import checkpoints  # noqa: E402 - transformers must be imported after the guard

checkpoints.build(sys.argv[1], Path(sys.argv[2]))
