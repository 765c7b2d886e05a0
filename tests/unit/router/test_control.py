from __future__ import annotations

from epd_portable.router.fleet.control import ControlChannels
from tests.keyring import keys

MANY = 1100
"""More sockets than a ZMQ context has by default."""


async def test_there_is_a_channel_to_each_of_many_instances() -> None:
    control = ControlChannels(keys())
    try:
        for number in range(MANY):
            control.connect(f"pd-{number}", "tcp://127.0.0.1:9")
    finally:
        await control.close()
