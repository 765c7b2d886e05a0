from __future__ import annotations

from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.http import open_files
from tests.keyring import keys

MANY = 1100
"""More sockets than a ZMQ context has by default."""


async def test_there_is_a_channel_to_each_of_many_instances() -> None:
    control = ControlChannels(keys())
    try:
        # A machine that allows fewer files cannot show it.
        for number in range(min(MANY, open_files.raise_limit() - 200)):
            control.connect(f"pd-{number}", "tcp://127.0.0.1:9")
    finally:
        await control.close()
