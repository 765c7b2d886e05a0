from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from epd_portable.errors import ConfigError, NoCommonPathError
from epd_portable.platforms import registry as platforms
from epd_portable.transfer import registry
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.paths.base import PathReceiver, PathWriter
from epd_portable.transfer.registry import Refused
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor
from tests.keyring import keys
from tests.unit.builders import peer

EVERY_PATH = tuple(
    PathEndpoint(path=entry.name, address=f"{entry.name}-address") for entry in registry.PATHS
)
ALL = ("cuda", "npu", "cpu")
NO_DEVICES = Refused(path="ipc", reason="cpu has no device memory")


really_missing = registry.missing


@pytest.fixture(autouse=True)
def every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are those of an environment that has everything, whatever this one has."""
    monkeypatch.setattr(registry, "missing", lambda path: "")


def on(
    platform: str, instance: str, *, off_host: bool = False, **changes: object
) -> PeerDescriptor:
    """An end that offers what its platform has under ``auto``."""
    names = {entry.name for entry in registry.offered("auto", platform, off_host=off_host)}
    paths = tuple(endpoint for endpoint in EVERY_PATH if endpoint.path in names)
    return peer(instance, **{"device": f"{platform}:0", "paths": paths, **changes})


@pytest.mark.parametrize(
    ("encode", "pd", "same_host", "taken"),
    [
        ("cpu", "cpu", True, "shm"),
        ("cuda", "cuda", True, "ipc"),
        ("npu", "npu", True, "ipc"),
        ("cpu", "npu", True, "shm"),
        ("npu", "cpu", True, "shm"),
        ("cuda", "npu", True, "shm"),
        ("npu", "npu", False, "collective"),
        ("cpu", "cpu", False, "tcp"),
        ("cpu", "npu", False, "tcp"),
    ],
)
def test_best_path_is_chosen_for_each_pair(
    encode: str, pd: str, same_host: bool, taken: str
) -> None:
    host = "host" if same_host else "elsewhere"
    choice = registry.choose(on(encode, "encode-0", host=host), on(pd, "pd-0"))
    assert choice.endpoint == PathEndpoint(path=taken, address=f"{taken}-address")
    better = [entry.name for entry in registry.PATHS]
    assert [refused.path for refused in choice.refused] == better[: better.index(taken)]


def test_every_better_path_not_taken_is_named_with_reason() -> None:
    choice = registry.choose(on("cpu", "encode-0", host="elsewhere"), on("npu", "pd-0"))
    assert choice.refused == (
        NO_DEVICES,
        Refused(path="shm", reason="encode-0 and pd-0 do not share /dev/shm"),
        Refused(path="nixl", reason="not offered by encode-0"),
        Refused(path="collective", reason="encode-0 is on cpu, pd-0 on npu"),
    )


@pytest.mark.parametrize("missing_at", ["encode-0", "pd-0"])
def test_without_a_common_path_the_error_holds_every_reason(missing_at: str) -> None:
    ends = [
        on("npu", name, off_host=True, **({"paths": ()} if name == missing_at else {}))
        for name in ("encode-0", "pd-0")
    ]
    with pytest.raises(NoCommonPathError) as caught:
        registry.choose(*ends)
    for entry in registry.PATHS:
        assert f"{entry.name}: not offered by {missing_at}" in str(caught.value)


def test_a_path_that_was_asked_for_is_the_only_one_offered() -> None:
    def names(asked: str, platform: str) -> list[str]:
        return [entry.name for entry in registry.offered(asked, platform)]

    assert names("tcp", "cpu") == ["tcp"]
    assert names("auto", "cpu") == ["shm", "tcp"]
    assert names("collective", "cpu") == ["collective"]
    assert names("auto", "npu") == names("auto", "cuda") == ["ipc", "shm", "collective", "tcp"]
    assert names("nixl", "cpu") == ["nixl"]
    with pytest.raises(ConfigError, match=r"transfer\.path 'rdma': expected auto or one of ipc,"):
        registry.offered("rdma", "cpu")
    with pytest.raises(ConfigError, match=r"transfer\.path 'ipc': cpu has no device memory"):
        registry.offered("ipc", "cpu")


@pytest.mark.parametrize("entry", registry.PATHS, ids=lambda entry: entry.name)
def test_every_entry_loads_what_it_names(entry: registry.PathEntry) -> None:
    if missing := really_missing(entry):
        pytest.skip(missing)
    copies = DeviceCopies(platforms.get("cpu"))
    writer = registry.load_writer(entry.name, copies, keys())
    assert isinstance(writer, PathWriter)
    writer.close()
    if entry.receiver:
        assert issubclass(registry._load(entry.receiver), PathReceiver)


def test_choosing_loads_no_path() -> None:
    code = (
        "import sys; from epd_portable.transfer import registry; registry.offered('auto', 'npu');"
        "print([m for m in sys.modules if '.transfer.paths.' in m or m == 'torch'])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "['epd_portable.transfer.paths.base']"


ACCELERATORS = ("cuda", "npu")


@pytest.mark.parametrize(
    ("asks", "paths", "platforms"),
    [
        (registry.copies_in_place, ("shm",), ("cpu",)),
        (registry.queues_copies, ("ipc", "shm"), ACCELERATORS),
        (registry.in_device_memory, ("ipc", "collective"), ACCELERATORS),
        (lambda path, platform: path in registry.fenced_paths(), ("collective", "tcp"), ALL),
    ],
    ids=["host memory to host memory", "queued on a device", "in device memory", "fenced"],
)
def test_features_of_a_path_on_each_platform(
    asks: Callable[[str, str], bool], paths: tuple[str, ...], platforms: tuple[str, ...]
) -> None:
    found = {
        (entry.name, name) for entry in registry.PATHS for name in ALL if asks(entry.name, name)
    }
    assert found == {(path, name) for path in paths for name in platforms}


@pytest.mark.parametrize("platform", ["cuda", "npu", "cpu"])
def test_each_path_is_described_or_has_a_reason(platform: str) -> None:
    described = {path: found for path, *found in registry.describe(platform, platform)}
    assert list(described) == [entry.name for entry in registry.PATHS]
    assert all(reason for _, reason in described.values())
    usable = [path for path, (usable, _) in described.items() if usable]
    if platform == "cpu":
        assert usable == ["shm", "nixl", "collective", "tcp"]
        assert described["ipc"] == [False, NO_DEVICES.reason]
        assert "only when configured" in described["collective"][1]
        assert described["shm"][1].endswith("; nothing is copied after that")
        assert described["tcp"][1].endswith("; in host memory")
    else:
        offered = registry.offered("auto", platform, off_host=True)
        assert usable == [each.name for each in offered]
    assert "between hosts, or when configured" in described["nixl"][1]


def test_path_between_platforms_gives_its_reason_or_its_copies() -> None:
    described = {path: found for path, *found in registry.describe("cpu", "npu")}
    assert described["ipc"] == [False, NO_DEVICES.reason]
    assert described["collective"] == [False, "the encode side is on cpu, the other on npu"]
    for path in ("shm", "tcp"):
        usable, reason = described[path]
        assert usable and reason.endswith("; copies: one to the device")
    (_, _, both) = registry.describe("npu", "npu")[1]
    assert both.endswith("; copies: one from the device and one to the device")


def test_path_without_encryption_is_left_out_where_it_is_needed() -> None:
    assert "collective" in {path.name for path in registry.offered("auto", "npu")}
    left = {path.name for path in registry.offered("auto", "npu", plain=False)}
    assert left == {"ipc", "shm", "tcp"}
    with pytest.raises(ConfigError, match="trusted_network"):
        registry.offered("collective", "cpu", plain=False)


@pytest.mark.parametrize("platform", ALL)
def test_nixl_precedes_socket_paths_between_hosts(platform: str) -> None:
    ends = [on(platform, name, off_host=True, host=name) for name in ("encode-0", "pd-0")]
    assert registry.choose(*ends).endpoint.path == "nixl"
    same = [on(platform, name, off_host=True) for name in ("encode-0", "pd-0")]
    assert registry.choose(*same).endpoint.path == ("shm" if platform == "cpu" else "ipc")
    encrypted = registry.offered("auto", platform, plain=False, off_host=True)
    assert "nixl" not in {entry.name for entry in encrypted}


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert "nixl" not in {entry.name for entry in registry.offered("auto", "cpu", off_host=True)}
    with pytest.raises(ConfigError, match=r"nixl is not installed: install epd-portable\[kv\]"):
        registry.offered("nixl", "cpu")
    described = {path: found for path, *found in registry.describe("cpu", "cpu")}
    assert described["nixl"] == [False, "nixl is not installed: install epd-portable[kv]"]
