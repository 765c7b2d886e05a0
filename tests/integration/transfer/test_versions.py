"""A rolling update over two versions of the control protocol: real encode processes and receiver.

No transfer reaches its deadline: whatever ends here ends by a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epd_portable.wire import codec, messages
from tests.contract.pairs import ROUTES
from tests.kit.encode_side import output
from tests.kit.ends import EncodeSide, PrefillSide
from tests.waiting import until

OLD = messages.PROTOCOL_VERSION
NEW = OLD + 1
NAMES = ("encode-0", "encode-1")
UNLIMITED_S = 3600.0
TOKENS = 20
SHM = next(route for route in ROUTES if route.path == "shm")


class Site:
    """Two encode instances and one prefill+decode instance, each of some version."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.encoders: dict[str, EncodeSide] = {}
        self.versions: dict[str, int] = {}
        self.pd: PrefillSide | None = None
        self._patch = patch
        self._requests = 0
        for name in (*NAMES, "pd"):
            self.update(name, OLD)

    def update(self, name: str, version: int) -> None:
        """Start an instance again, of a version."""
        self.versions[name] = version
        if name == "pd":
            if self.pd is not None:
                self._close_pd()
            for module in (messages, codec):
                self._patch.setattr(module, "PROTOCOL_VERSION", version)
            self.pd = PrefillSide(SHM, self.folder, wait_timeout_s=UNLIMITED_S)
            self.pd.shell.listen()
            return
        if name in self.encoders:
            self.encoders[name].close()
        self.encoders[name] = EncodeSide(
            "shm", "cpu", name, protocol=version, wait_timeout_s=UNLIMITED_S
        )

    def serve(self, first: str, *, announced_first: bool) -> list[str]:
        """Serve a request whose item one encoder is asked for first; return all that were."""
        assert self.pd is not None
        self._requests += 1
        request, item = f"r{self._requests}", f"item-{self._requests}"
        transfer = f"t-{request}"
        asked: list[str] = []
        pd, others = self.pd, [each for each in NAMES if each != first]
        if not announced_first:
            self._arrive(pd, request, item)
        for name in (first, *others):
            asked.append(name)
            encoder = self.encoders[name]
            encoder.tell("order", transfer, item, pd.address, TOKENS)
            encoder.tell("output", item, TOKENS)
            if self.versions[name] != self.versions["pd"]:
                # Both ends know: the encoder's transfer is over, and the front is asked again.
                until(lambda encoder=encoder: transfer in encoder.ended())
                if announced_first and len(asked) == 1:
                    self._arrive(pd, request, item)
                pd.wait_until(lambda: transfer in self._requested(pd))
                continue
            if announced_first and len(asked) == 1:
                self._arrive(pd, request, item)
            pd.step_until(lambda: item in pd.placed)
            assert torch.equal(pd.encoder_cache[item], output(item, TOKENS))
            break
        with pd.shell.lock:
            pd.finish(request)
        return asked

    def close(self) -> None:
        for each in self.encoders.values():
            each.close()
        self._close_pd()

    def _arrive(self, pd: PrefillSide, request: str, item: str) -> None:
        with pd.shell.lock:
            pd.arrive(request, item, TOKENS)

    def _requested(self, pd: PrefillSide) -> tuple[str, ...]:
        news = pd.prefill.take_news()
        return news.requested if news is not None else ()

    def _close_pd(self) -> None:
        assert self.pd is not None
        self.pd.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    found = Site(tmp_path, monkeypatch)
    try:
        yield found
    finally:
        found.close()


Order = tuple[str, ...]


@pytest.mark.parametrize("announced_first", [False, True], ids=["request first", "item first"])
@pytest.mark.parametrize(
    "order",
    [
        ("encode-0", "encode-1", "pd"),
        ("pd", "encode-0", "encode-1"),
        ("encode-0", "pd", "encode-1"),
    ],
    ids=" ".join,
)
def test_rolling_update_keeps_no_item_waiting(
    site: Site, order: Order, announced_first: bool
) -> None:
    def serve() -> list[list[str]]:
        return [site.serve(name, announced_first=announced_first) for name in NAMES]

    assert serve() == [["encode-0"], ["encode-1"]]
    for name in order:
        site.update(name, NEW)
        served = serve()
        fitting = [each for each in NAMES if site.versions[each] == site.versions["pd"]]
        for asked in served:
            # Encoders of the other version are passed over, without a deadline.
            assert (asked[-1] in fitting) if fitting else asked[-1] != asked[0]
    assert serve() == [["encode-0"], ["encode-1"]]


def test_versions_of_a_peer_are_logged_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.update("encode-0", NEW)
    for _ in range(3):
        site.serve("encode-0", announced_first=False)
    words = f"protocol {NEW} at the sender, {OLD} at the receiver"
    refused = [each.getMessage() for each in caplog.records if words in each.getMessage()]
    assert sum("control messages" in each for each in refused) == 1
