"""Small values that tests of transfers and of instances are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epd_portable.config.roles import Role
from epd_portable.config.secret import Secret
from epd_portable.encode.two_levels import TwoLevelCache
from epd_portable.items.table import PromptItem
from epd_portable.placement.instances import EngineSettings
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, SlotDescriptor, TensorSpec
from epd_portable.wire.params import EncodeParams, EncodeTransfer

FINGERPRINT = "same"
SECRET = Secret("a secret that only tests have")
SPEC = TensorSpec(shape=(4, 8), dtype="float32")


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def peer(instance: str = "encode-0", **changes: object) -> PeerDescriptor:
    values: dict[str, object] = {
        "instance": instance,
        "session": f"{instance}-life-1",
        "host": "host",
        "device": "cpu:0",
        "fingerprint": FINGERPRINT,
        "paths": (PathEndpoint(path="shm"), PathEndpoint(path="tcp")),
    }
    return PeerDescriptor(**(values | changes))


def slot(generation: int = 1, *, offset: int = 0, nbytes: int = SPEC.nbytes) -> SlotDescriptor:
    return SlotDescriptor(pool="pool", offset=offset, nbytes=nbytes, generation=generation)


def place(
    mm_hash: str, tensor: TensorSpec, begin: int = 0, tokens: int = 0, **more: Any
) -> PromptItem:
    """Return an item's place in a prompt, with a token for each embedding unless told."""
    embeds = tensor.shape[0]
    end = begin + (tokens or embeds)
    given = {"mm_hash": mm_hash, "tensor": tensor, "begin": begin, "end": end, "input_id": 0}
    return PromptItem(**{**given, "num_embeds": embeds, **more})


@dataclass(frozen=True)
class FakeFeature:
    identifier: str


@dataclass(frozen=True)
class FakeRequest:
    """Part of vLLM's ``Request`` that the bookkeeping reads: ids, items and sizes. No tokens."""

    request_id: str
    mm_features: Sequence[FakeFeature]
    sizes: Sequence[int] = field(default_factory=list)

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self.sizes[input_id]


def request(request_id: str, *items: tuple[str, int]) -> FakeRequest:
    """Return a request whose items are ``(mm_hash, num_embeds)``."""
    return FakeRequest(
        request_id, [FakeFeature(name) for name, _ in items], [size for _, size in items]
    )


def encoder_cache(cache_size: int) -> TwoLevelCache:
    """Return the encoder cache of an encode instance, without copies in host memory."""
    return TwoLevelCache(cache_size, 0, lambda request, index: 1)


def encode_params(
    transfers: Mapping[str, str], consumer: str, secret: Secret = SECRET
) -> EncodeParams:
    """Return signed orders to send items, by ``transfer id -> item``, to a consumer."""
    return EncodeParams(
        transfers=tuple(
            EncodeTransfer(
                transfer_id=transfer_id,
                item_uuid=item,
                consumer=consumer,
                proof=secret.sign_transfer(transfer_id, item, consumer),
            )
            for transfer_id, item in transfers.items()
        )
    )


def instance_settings(name: str, role: Role = "encode", **more: Any) -> EngineSettings:
    """Return the specification of an instance; all but encode instances have a control channel."""
    control = "" if role == "encode" else "tcp://h:1"
    return EngineSettings(name=name, role=role, url=f"tcp://{name}:1", control=control, **more)
