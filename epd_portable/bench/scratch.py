"""Where the ends of a measurement leave their files, and the secret that they share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epd_portable.config.secret import make_secret_file


@contextmanager
def scratch_folder() -> Iterator[tuple[Path, str]]:
    """Yield a new folder and the path of a secret file in it; both go with the block."""
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as name:
        folder = Path(name)
        secret_file = str(folder / "secret")
        make_secret_file(secret_file)
        yield folder, secret_file
