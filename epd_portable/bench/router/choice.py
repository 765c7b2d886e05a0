"""How long a router's choice among many instances takes; run by the interpreter of any version.

Its text is given to ``python -c`` with a side's package in front, so it imports nothing of this
package but what it measures; of a version without that module there is no figure. Prints a JSON
object of microseconds by role.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable

from epd_portable.router.fleet.instances import Fleet
from epd_portable.router.settings import InstanceSettings, Role

WARM_UP = 2
ROLES: tuple[Role, ...] = ("encode", "prefill-decode")


def measure(names: int, repeats: int) -> dict[str, float]:
    """Return the median CPU time of one choice of each role, in µs.

    Args:
        names: Instances of each role to choose among, half of them with something in flight.
        repeats: Choices that are timed.
    """
    found: dict[str, float] = {}
    for role in ROLES:
        instances = Fleet()
        control = "tcp://127.0.0.1:9" if role == "prefill-decode" else ""
        for number in range(names):
            settings = InstanceSettings(
                name=f"instance-{number}", role=role, url="http://127.0.0.1:9", control=control
            )
            instance = instances.add(settings)
            instance.seen_well()
            if number % 2:
                instance.working().__enter__()
        choose: Callable[..., object] = (
            instances.encoder if role == "encode" else instances.prefill_decode
        )
        # Some versions ask for a key of the request, too.
        has_key = next(iter(inspect.signature(choose).parameters)) != "exclude"
        times = []
        for number in range(WARM_UP + repeats):
            begin_s = time.process_time()
            choose(f"key-{number}") if has_key else choose()
            times.append(time.process_time() - begin_s)
        found[role] = sorted(times[WARM_UP:])[repeats // 2] * 1e6
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
