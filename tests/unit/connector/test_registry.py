from __future__ import annotations

import subprocess
import sys
import time

import pytest

from epd_portable.connector import registry
from epd_portable.connector.transport import Receiver, Transport
from epd_portable.errors import ConfigError, NoCommonPathError
from epd_portable.wire.descriptors import PathEndpoint
from tests.unit.builders import peer

CONSUMER = peer(
    "pd-0", paths=(PathEndpoint(path="tcp", address="tcp://a:1"), PathEndpoint(path="shm"))
)


def test_the_best_path_that_both_ends_have_is_taken_with_the_consumer_s_address() -> None:
    choice = registry.choose(peer(), CONSUMER)
    assert (choice.endpoint.path, choice.refused) == ("shm", ())


def test_every_better_path_that_is_not_taken_is_named_with_its_reason() -> None:
    choice = registry.choose(peer(host="elsewhere"), CONSUMER)
    assert choice.endpoint == PathEndpoint(path="tcp", address="tcp://a:1")
    (refused,) = choice.refused
    assert (refused.path, refused.reason) == ("shm", "encode-0 and pd-0 do not share /dev/shm")


@pytest.mark.parametrize("missing_at", ["encode-0", "pd-0"])
def test_without_a_common_path_the_error_holds_every_reason(missing_at: str) -> None:
    producer = peer(paths=() if missing_at == "encode-0" else peer().paths)
    consumer = peer("pd-0", paths=() if missing_at == "pd-0" else CONSUMER.paths)
    with pytest.raises(NoCommonPathError) as caught:
        registry.choose(producer, consumer)
    for path in ("shm", "tcp"):
        assert f"{path}: not offered by {missing_at}" in str(caught.value)


def test_a_path_that_was_asked_for_is_the_only_one_allowed() -> None:
    assert registry.allowed("tcp") == ("tcp",)
    assert registry.allowed("auto") == ("shm", "tcp")
    with pytest.raises(
        ConfigError, match=r"transfer\.path 'rdma': expected auto or one of shm, tcp"
    ):
        registry.allowed("rdma")


@pytest.mark.parametrize("entry", registry.PATHS, ids=lambda entry: entry.name)
def test_every_entry_loads_what_it_names(entry: registry.PathEntry) -> None:
    transport = registry.load_transport(entry.name, time.monotonic)
    assert isinstance(transport, Transport)
    transport.close()
    receiver = registry.load_receiver(entry.name)
    assert (receiver is None) == (not entry.receiver)
    assert receiver is None or issubclass(receiver, Receiver)  # type: ignore[arg-type]


def test_choosing_loads_no_transport() -> None:
    code = (
        "import sys; from epd_portable.connector import registry; registry.allowed('auto');"
        "print([m for m in sys.modules if 'transports' in m or m == 'torch'])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "[]"


def test_fenced_paths_are_those_whose_consumer_does_the_last_step() -> None:
    assert registry.fenced_paths() == {"tcp"}


def test_every_path_is_described() -> None:
    described = registry.describe("cpu")
    assert [path for path, _, _ in described] == [entry.name for entry in registry.PATHS]
