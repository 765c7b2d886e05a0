"""Both ends of transfers without an engine, over real sockets and memory."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from epd_portable.config.instance import InstanceConfig
from epd_portable.items.metrics import ConsumerMetrics
from epd_portable.items.placer import Placer
from epd_portable.items.requests import PrefillRequests
from epd_portable.items.shell import ItemShell
from epd_portable.platforms import registry
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.worker_endpoint import WorkerEndpoint
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.messages import PROTOCOL_VERSION
from epd_portable.wire.params import ExpectedTransfer, PrefillOutcome, PrefillParams
from tests import warm
from tests.contract.pairs import Route
from tests.keyring import secret_file
from tests.kit.encode_side import FINGERPRINT, LEASE_S, TIMEOUT_S, WIDTH, output
from tests.receiving import pool_name
from tests.unit.builders import FakeRequest, place, request
from tests.waiting import until

DEADLINE_S = 60.0


class PrefillSide:
    """A PD instance without an engine: a real receiver and placer, stepped by the test.

    Args:
        route: Path, and platforms of both ends.
        folder: Of its control socket.
        pool_bytes: Size of its pool.
        lease_s: See `InstanceConfig`, as are ``wait_timeout_s`` and ``data_address``.
        pool: Name of its pool; empty for a new one.
        address: Of its control channel; empty for a new one.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        route: Route,
        folder: Path,
        pool_bytes: int = 1 << 20,
        lease_s: float = LEASE_S,
        wait_timeout_s: float = TIMEOUT_S,
        *,
        pool: str = "",
        address: str = "",
        data_address: str = "tcp://127.0.0.1:*",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pair = route.pair
        platform = registry.get(pair.prefill)
        platform.set_device(pair.prefill_index)
        self.platform = platform
        self.computes_in_slots = not platform.traits.needs_device_copy
        self.pool = pool or pool_name()
        self.address = address or f"ipc://{folder}/{uuid.uuid4().hex[:8]}"
        config = InstanceConfig(
            instance="prefill_decode-0",
            platform=pair.prefill,  # type: ignore[arg-type]
            device_index=pair.prefill_index,
            control_address=self.address,
            data_address=data_address,
            pool=self.pool,
            pool_bytes=pool_bytes,
            path=route.path,
            wait_timeout_s=wait_timeout_s,
            lease_s=lease_s,
            secret_file=secret_file(),
        )
        copies = DeviceCopies(platform, pair.prefill_index)
        self.endpoint = WorkerEndpoint(config, copies)
        self.registry = CollectorRegistry()
        self.placer = Placer(copies, self.endpoint)
        self.shell = ItemShell(
            config,
            fingerprint=FINGERPRINT,
            cache_size=10_000,
            clock=clock,
            metrics=ConsumerMetrics(self.registry),
        )
        self.prefill = PrefillRequests(config, self.shell)
        self.cache = self.shell.cache
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self.placed: list[str] = []
        self.requests: dict[str, FakeRequest] = {}

    @property
    def free_bytes(self) -> int:
        return self.shell.pool.free_bytes

    @property
    def pool_bytes(self) -> int:
        return self.shell.pool.capacity_bytes

    def arrive(self, request_id: str, mm_hash: str, num_tokens: int) -> None:
        """A request with one item arrives, whose transfer is ``t-<request id>``."""
        transfers = {mm_hash: f"t-{request_id}"}
        self.arrive_with(request_id, num_tokens, transfers)

    def arrive_with(self, request_id: str, num_tokens: int, transfers: dict[str, str]) -> None:
        """A request arrives with items of one size, given as transfers by ``mm_hash``."""
        self.requests[request_id] = request(
            request_id, *((mm_hash, num_tokens) for mm_hash in transfers)
        )
        tensor = TensorSpec(shape=(num_tokens, WIDTH), dtype="float32")
        items = [
            place(mm_hash, tensor, 1 + index * (num_tokens + 1), input_id=index)
            for index, mm_hash in enumerate(transfers)
        ]
        expected = tuple(
            ExpectedTransfer(transfer_id=transfer_id, item_uuid=mm_hash)
            for mm_hash, transfer_id in transfers.items()
        )
        params = PrefillParams(transfers=expected)
        self.prefill.arrived(request_id, items, params)

    def granted(self, transfer_id: str) -> bool:
        """Return whether a producer may write by this transfer."""
        items = self.cache.items.values()
        return any(
            name == transfer_id and each.grant is not None
            for item in items
            for name, each in item.transfers.items()
        )

    def step(self) -> None:
        with self.shell.lock:
            self.shell.take_in()
            self.shell.before_step()
            freed = self.cache.get_freed_mm_hashes()
            orders = self.shell.orders.take_orders(freed, computes=True)
        self.placer.carry_out(orders, self.encoder_cache)
        for mm_hash in freed:
            self.encoder_cache.pop(mm_hash, None)
        # An engine's step that computes has ended when the device has its output.
        self.platform.record_event().synchronize(DEADLINE_S)
        self.placed += [placement.mm_hash for placement in orders.placements]
        with self.shell.lock:
            self.shell.step_done()

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Step as an engine does while requests wait, until the condition holds."""
        until(lambda: condition() or self.step())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait without stepping, where the receiver listens by itself."""

        def holds() -> bool:
            with self.shell.lock:
                return condition()

        until(holds)

    def finish(self, request_id: str) -> PrefillOutcome:
        outcome = self.prefill.finished(request_id)
        assert outcome is not None
        self.cache.free(self.requests.pop(request_id))
        return outcome

    def served(self) -> dict[str, str]:
        """End each request of one item that has its item, which it must read as it was sent.

        Returns:
            How each had it, by request: ``transfer``, or ``local`` where the instance encodes it.
        """
        found = {}
        for request_id, waiting in list(self.requests.items()):
            mm_hash = waiting.mm_features[0].identifier
            if mm_hash in self.encoder_cache:
                expected = output(mm_hash, waiting.get_num_encoder_embeds(0))
                assert torch.equal(self.encoder_cache[mm_hash].cpu(), expected)
                found[request_id] = "transfer"
            elif not self.prefill.may_schedule(request_id, 1):
                continue
            elif self.cache.check_and_update_cache(waiting, 0):
                continue  # It has landed; the next step places it.
            else:
                found[request_id] = "local"
            self.finish(request_id)
        return found

    def kept(self) -> dict[str, int]:
        """Return what is still kept when nothing is under way and the cache is emptied."""
        self.cache.reset()
        self.step()
        counts = {
            "bytes": self.pool_bytes - self.free_bytes,
            "embeddings": self.cache.cache_size - self.cache.num_free_slots,
            "transfers": sum(len(item.transfers) for item in self.cache.items.values()),
            "outputs": len(self.encoder_cache),
        }
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        self.shell.close()
        self.endpoint.close()


class EncodeSide:
    """An encode worker in a process of its own."""

    def __init__(
        self,
        path: str,
        platform: str,
        name: str = "encode-0",
        *,
        protocol: int = PROTOCOL_VERSION,
        wait_timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.process = warm.start(
            "-m",
            "tests.kit.encode_side",
            path,
            platform,
            name,
            str(protocol),
            str(wait_timeout_s),
            # torch_npu over the simulated runtime starts no thread when it is imported.
            cold=platform == "cuda",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()

    def tell(self, verb: str, *words: object) -> str:
        assert self.process.stdin is not None
        print(json.dumps({verb: words}), file=self.process.stdin, flush=True)
        return self._answer()

    def ended(self) -> list[str]:
        """Return the transfers that have ended since the last call."""
        found: list[str] = json.loads(self.tell("ended"))
        return found

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the encode side has ended"
        return str(line)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()
