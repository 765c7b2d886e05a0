"""``python -m tests.property.engine_model [encode] --seeds 0:5000 --seconds 3600``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter

from tests.property.engine_model import encode, world
from tests.property.engine_model.running import Failure, attempt

WORLDS = {"prefill-decode": world.World, "encode": encode.World}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.property.engine_model")
    parser.add_argument("role", nargs="?", default="prefill-decode", choices=WORLDS)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, or one seed")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the processor, at most")
    parser.add_argument("--trace", type=int, default=0, help="lines of the trace of each failure")
    parser.add_argument("--most", type=int, default=10**9, help="end after so many failures")
    given = parser.parse_args()
    first, _, end = given.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    begin_s, tried, failures = time.process_time(), 0, 0
    seen: Counter[str] = Counter()
    for seed in seeds:
        if time.process_time() - begin_s > given.seconds or failures >= given.most:
            break
        found = attempt(seed, WORLDS[given.role], lines=given.trace)
        tried += 1
        if isinstance(found, Failure):
            failures += 1
            print(found, flush=True)
        else:
            seen.update(found)
    spent_s = time.process_time() - begin_s
    print(f"{tried} seeds, {failures} failed, in {spent_s:.0f} s")
    print(json.dumps(dict(sorted(seen.items()))))
    return 1 if failures else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of names are gone through in the same order then, and a seed is the same run.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(
            sys.executable, [sys.executable, "-m", "tests.property.engine_model", *sys.argv[1:]]
        )
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        traceback.print_exc(limit=1)
        sys.exit(130)
