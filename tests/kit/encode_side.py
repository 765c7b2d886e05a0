"""An encode worker without an engine: ``encode_side.py PATH PLATFORM NAME PROTOCOL TIMEOUT_S``.

Obeys JSON lines: ``{"order": [transfer_id, mm_hash, consumer, num_tokens]}`` announces an item,
``{"output": [mm_hash, num_tokens]}`` puts it out, ``{"ended": []}`` returns the transfers that have
ended since. Each is answered with a line.
"""

from __future__ import annotations

import json
import sys
import zlib

import torch

from epd_portable.config.instance import InstanceConfig
from epd_portable.encode.producer import TransferOrder
from epd_portable.encode.sender import Sender
from epd_portable.encode.store_writer import StoreWriter
from epd_portable.items.metrics import SenderMetrics
from epd_portable.platforms import registry
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.wire import codec, messages
from epd_portable.wire.descriptors import TensorSpec
from tests.keyring import secret_file

WIDTH = 64
FINGERPRINT = "same"
LEASE_S, TIMEOUT_S = 10.0, 20.0
"""On a busy machine the first item of `collective` takes seconds: a group is made for it."""


def output(mm_hash: str, num_tokens: int) -> torch.Tensor:
    """Return what the encoder puts out for an item, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(mm_hash.encode()))
    return torch.randn(num_tokens, WIDTH, generator=generator)


def order(transfer_id: str, mm_hash: str, consumer: str, num_tokens: int) -> TransferOrder:
    return TransferOrder(
        transfer_id=transfer_id,
        mm_hash=mm_hash,
        consumer=consumer,
        tensor=TensorSpec(shape=(num_tokens, WIDTH), dtype="float32"),
    )


class CountedSender(Sender):
    """A sender whose metrics a test can read."""

    def __init__(
        self,
        config: InstanceConfig,
        copies: DeviceCopies,
        fingerprint: str = FINGERPRINT,
        store: StoreWriter | None = None,
    ) -> None:
        self.metrics = SenderMetrics()
        super().__init__(config, fingerprint, copies, self.metrics, store)

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        value = self.metrics.registry.get_sample_value("epd_encode_transfers_in_flight")
        assert value is not None
        return int(value)


def make_sender(
    path: str,
    wait_timeout_s: float = TIMEOUT_S,
    platform: str = "cpu",
    name: str = "encode-0",
    lease_s: float = LEASE_S,
) -> CountedSender:
    """Return the sender of an encode worker on the first device."""
    config = InstanceConfig(
        instance=name,
        platform=platform,  # type: ignore[arg-type]
        path=path,
        wait_timeout_s=wait_timeout_s,
        lease_s=lease_s,
        secret_file=secret_file(),
    )
    registry.get(platform).set_device(0)
    return CountedSender(config, DeviceCopies(registry.get(platform)))


def use_protocol(version: int) -> None:
    """Let this process be of another version of the control protocol."""
    messages.PROTOCOL_VERSION = codec.PROTOCOL_VERSION = version


def main(
    path: str,
    platform: str,
    name: str = "encode-0",
    protocol: str = str(messages.PROTOCOL_VERSION),
    timeout_s: str = str(TIMEOUT_S),
) -> None:
    use_protocol(int(protocol))
    sender = make_sender(path, float(timeout_s), platform=platform, name=name)
    device = registry.get(platform).device(0)
    print("ready", flush=True)
    for line in sys.stdin:
        ((verb, words),) = json.loads(line).items()
        if verb == "ended":
            print(json.dumps(sorted(sender.progress.take_ended())), flush=True)
            continue
        if verb == "order":
            sender.submit(order(*words), None)
        else:
            sender.output_ready(words[0], output(*words).to(device))
        print("done", flush=True)
    sender.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
