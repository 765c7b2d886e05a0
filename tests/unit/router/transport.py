"""A transport without a socket."""

from __future__ import annotations

import asyncio
from typing import Any


class Transport(asyncio.Transport):
    """Keeps what is written, and what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads = True
        self.closing = False
        self.lost = False
        self.unsent_bytes = 0

    def write(self, data: Any) -> None:
        assert not self.lost
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None:
        assert not self.lost
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.lost
        self.reads = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes
