"""A consumer in a process of its own: ``python transport_consumer.py <path> <pool> <bytes>``.

Prints the address for grants, then obeys lines: ``allow <slot>``, ``forbid <slot>`` (msgpack, hex)
and ``read <offset> <nbytes>``, which answers with a digest. Ends with its standard input.
"""

from __future__ import annotations

import hashlib
import sys

import msgspec

from epd_portable.connector import registry
from epd_portable.connector.pool import SharedMemory
from epd_portable.connector.transport import LeaseFence
from epd_portable.wire.descriptors import SlotDescriptor


def main(path: str, pool: str, nbytes: int) -> None:
    memory = SharedMemory.create(pool, nbytes)
    fence = LeaseFence()
    make = registry.load_receiver(path)
    receiver = make(memory, "tcp://127.0.0.1:*", fence) if make else None
    print(receiver.address if receiver else memory.identity, flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        answer = "done"
        if verb == "read":
            data = memory.tensor(int(words[0]), int(words[1]))
            answer = hashlib.sha256(data.numpy().tobytes()).hexdigest()
        else:
            slot = msgspec.msgpack.decode(bytes.fromhex(words[0]), type=SlotDescriptor)
            (fence.allow if verb == "allow" else fence.forbid)(slot)
        print(answer, flush=True)
    if receiver:
        receiver.close()
    memory.unlink()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
