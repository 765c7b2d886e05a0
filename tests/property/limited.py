"""``python -m tests.property.limited MEGABYTES WHAT``: read a bomb with little memory to do it in.

Ends with 0 when the text was read, or refused by the error that is declared for it.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from epd_portable.config.load import parse_topology
from epd_portable.errors import ConfigError

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
CONFIGURATIONS: dict[str, tuple[str, list[str]]] = {
    "laughs": (LAUGHS, []),
    "laughs of mappings": (
        "a: &a {k: 1, l: 2}\n"
        + "".join(
            f"{n}: &{n} {{k: *{b}, l: *{b}}}\n" for b, n in zip("abcdefgh", "bcdefghi", strict=True)
        )
        * 1,
        [],
    ),
    "laughs as a key": ("? " + LAUGHS.replace("\n", "\n  ") + "\n: 1\n", []),
    "laughs in an override": (
        "model: demo\n",
        [f"model={{{LAUGHS.strip().replace(chr(10), ', ')}}}"],
    ),
    "nested": ("a: " + "[" * 500_000, []),
    "nested blocks": ("\n".join(" " * i + "a:" for i in range(1200)), []),
    "nested in an override": ("model: demo\n", ["model=" + "[" * 100_000]),
    "a long number": ("model: " + "9" * 900_000, []),
    "a long sexagesimal": ("model: " + "1:" * 300_000 + "1", []),
    "many keys": ("".join(f"k{number}: 1\n" for number in range(15_000)), []),
    "merges": ("a: &a {k: 1}\nb: {<<: *a}\n", []),
    "a python object": ("model: !!python/object/apply:os.system ['false']\n", []),
}


def main(megabytes: int, what: str) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + megabytes * (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        text, overrides = CONFIGURATIONS[what]
        parse_topology(text, "cpu", overrides=overrides)
    except ConfigError as error:
        print(str(error)[:300])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
