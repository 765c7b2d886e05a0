"""How long a router's choice among many instances takes; run by the interpreter of any version.

Its text is given to ``python -c`` with a side's package in front, so it imports nothing of this
package but what it measures. Prints a JSON object of microseconds by role.
"""

from __future__ import annotations

import json
import sys
import time

from epd_portable.router.policy import choose_encoder, choose_pd

WARM_UP = 2


def measure(names: int, repeats: int) -> dict[str, float]:
    """Return the median CPU time of one choice of each role, in µs.

    Args:
        names: Instances to choose among, half of them with something in flight.
        repeats: Choices that are timed.
    """
    loads = {f"instance-{number}": number % 2 for number in range(names)}
    found = {}
    for role, choose in (("encode", choose_encoder), ("prefill-decode", choose_pd)):
        times = []
        for number in range(WARM_UP + repeats):
            begin_s = time.process_time()
            choose(f"key-{number}", loads)
            times.append(time.process_time() - begin_s)
        found[role] = sorted(times[WARM_UP:])[repeats // 2] * 1e6
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
