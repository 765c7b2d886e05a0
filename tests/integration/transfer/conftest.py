from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from epd_portable.config.instance import InstanceConfig
from epd_portable.connector import registry as paths
from epd_portable.connector.pool import SHM_FOLDER
from epd_portable.platforms import registry
from epd_portable.runners.placer import Placer
from epd_portable.runners.prompt import PromptItem
from epd_portable.runners.receiver import Receiver
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.params import ExpectedTransfer, PrefillOutcome, PrefillParams
from tests.integration.transfer.encode_side import FINGERPRINT, LEASE_S, TIMEOUT_S, WIDTH
from tests.unit.builders import FakeRequest, request

DEADLINE_S = 60.0


class PrefillSide:
    """A PD instance without an engine: a real receiver and placer, stepped by the test."""

    def __init__(self, path: str, folder: Path, pool_bytes: int = 1 << 20) -> None:
        self.pool = f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.address = f"ipc://{folder}/control"
        self.cache = EncoderCacheManager(10_000)
        self.receiver = Receiver(
            InstanceConfig(
                instance="prefill_decode-0",
                platform="cpu",
                control_address=self.address,
                data_address="tcp://127.0.0.1:*",
                pool=self.pool,
                pool_bytes=pool_bytes,
                path=path,
                wait_timeout_s=TIMEOUT_S,
                lease_s=LEASE_S,
            ),
            fingerprint=FINGERPRINT,
            cache=self.cache,
            alignment_bytes=64,
            copies=False,
        )
        platform = registry.get("cpu")
        self.placer = Placer(platform, platform.device(0))
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self.placed: list[str] = []
        self.requests: dict[str, FakeRequest] = {}

    @property
    def free_bytes(self) -> int:
        return self.receiver._pool.free_bytes

    @property
    def pool_bytes(self) -> int:
        return self.receiver._pool.capacity_bytes

    def arrive(self, request_id: str, mm_hash: str, num_tokens: int) -> None:
        self.requests[request_id] = request(request_id, (mm_hash, num_tokens))
        item = PromptItem(
            input_id=0,
            mm_hash=mm_hash,
            begin=1,
            end=1 + num_tokens,
            num_embeds=num_tokens,
            tensor=TensorSpec(shape=(num_tokens, WIDTH), dtype="float32"),
        )
        transfer = ExpectedTransfer(transfer_id=f"t-{request_id}", mm_hash=mm_hash)
        self.receiver.request_arrived(
            self.requests[request_id], [item], PrefillParams(transfers=(transfer,))
        )

    def step(self) -> None:
        self.receiver.tick()
        freed = self.cache.get_freed_mm_hashes()
        placements = self.receiver.take_placements(freed)
        self.placer.place(placements, self.encoder_cache)
        for mm_hash in freed:
            self.encoder_cache.pop(mm_hash, None)
        self.placed += [placement.mm_hash for placement in placements]
        self.receiver.step_done()

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Step as an engine does while requests wait, until the condition holds."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, "did not happen in time"
            self.step()
            time.sleep(0.001)

    def finish(self, request_id: str) -> PrefillOutcome:
        outcome = self.receiver.request_finished(request_id)
        assert outcome is not None
        self.cache.free(self.requests.pop(request_id))
        return outcome


class EncodeSide:
    """An encode worker in a process of its own."""

    def __init__(self, path: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.transfer.encode_side", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        self._answer()

    def tell(self, verb: str, *words: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps({verb: words}), file=self.process.stdin, flush=True)
        self._answer()

    def _answer(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), "the encode side has ended"

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()


@pytest.fixture(params=[entry.name for entry in paths.PATHS])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_pd(path: str, tmp_path: Path) -> Iterator[Callable[..., PrefillSide]]:
    made: list[PrefillSide] = []

    def make(**options: int) -> PrefillSide:
        made.append(PrefillSide(path, tmp_path, **options))
        return made[-1]

    yield make
    for pd in made:
        pd.receiver.close()
        assert not (SHM_FOLDER / pd.pool).exists()


@pytest.fixture
def encode(path: str) -> Iterator[EncodeSide]:
    side = EncodeSide(path)
    yield side
    side.close()
