"""Points of load at parts of the saturation that an earlier measurement found.

``python -m ci.load_rates BURSTS.json SIDE 0.3/0.6/0.9 COMMAND...`` reads what ``epd-bench load``
wrote of bursts, and runs a command with the same points at these parts of the side's throughput.
Needs the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def points(file: Path, side: str, parts: str) -> list[str]:
    """Return points of load, one for each burst of a side.

    Raises:
        SystemExit: The file has none.
    """
    try:
        samples = json.loads(file.read_text("utf-8"))["samples"]
    except (OSError, ValueError) as error:
        raise SystemExit(f"saturation is not known: {error}; measure the bursts first") from None
    found = {}
    for each in samples:
        burst, _, load = each["point"].partition(",")
        throughput = each["vllm"]["request_throughput"]
        if each["side"] == side and burst.startswith("prompts=") and throughput:
            rates = "/".join(f"{float(part) * throughput:.3g}" for part in parts.split("/"))
            found[load] = f"rate={rates},{load}"
    if not found:
        raise SystemExit(f"saturation is not known: no burst of side {side!r} in {file}")
    return list(found.values())


def main() -> None:
    """Become the command that the command line names."""
    file, side, parts, *command = sys.argv[1:]
    more = [word for point in points(Path(file), side, parts) for word in ("--point", point)]
    print(*more, flush=True)
    os.execvp(command[0], [*command, *more])


if __name__ == "__main__":
    main()
