"""A consumer that holds the secret and grants what is not its own: nothing is written there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epd_portable.encode.sender import Sender
from epd_portable.transfer.control import ControlServer
from epd_portable.transfer.pool import SHM_FOLDER
from epd_portable.wire.descriptors import SlotDescriptor
from epd_portable.wire.messages import Announce, Grant
from tests.kit.encode_side import order, output
from tests.kit.ends import DEADLINE_S
from tests.receiving import pool_name

CONTENT = b"mine" * 1000


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of this user alone that is as large as any pool."""
    file = tmp_path / "victim"
    file.write_bytes(CONTENT)
    file.chmod(0o600)
    return file


@pytest.fixture
def link(victim: Path) -> Iterator[Path]:
    """A link to it among the pools."""
    made = SHM_FOLDER / pool_name()
    made.symlink_to(victim)
    yield made
    made.unlink()


@pytest.mark.parametrize(
    "pool",
    [
        lambda victim, link: os.path.relpath(victim, SHM_FOLDER),
        lambda victim, link: "epd-x/" + os.path.relpath(victim, SHM_FOLDER / "epd-x"),
        lambda victim, link: str(victim),
        lambda victim, link: link.name,
    ],
    ids=["upwards", "upwards behind a good name", "absolute", "a link"],
)
def test_a_grant_of_anything_but_a_pool_is_not_written_under(
    sender: Sender,
    server: ControlServer,
    victim: Path,
    link: Path,
    pool: Callable[[Path, Path], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    item = output("cat", 10)
    sender.submit(order("t", "cat", server.address, 10), item)
    deadline_s = time.monotonic() + DEADLINE_S
    while "t" not in sender.progress.take_ended():
        assert time.monotonic() < deadline_s
        for identity, message in server.receive():
            if isinstance(message, Announce):
                slot = SlotDescriptor(
                    pool=pool(victim, link), offset=0, nbytes=item.nbytes, generation=1
                )
                grant = Grant(
                    transfer_id=message.transfer_id,
                    attempt=message.attempt,
                    slot=slot,
                    path="shm",
                    address=str(victim.stat().st_ino),
                    lease_s=DEADLINE_S,
                )
                server.send(identity, grant)
        time.sleep(0.01)
    assert victim.read_bytes() == CONTENT
    assert "transfer t ended: " in caplog.text
