"""How far an installer is, by what it has printed."""

from __future__ import annotations

import re

STEP = re.compile(
    r"^ *((?:Collecting|Downloading|Installing|Building|Prepar|Resolved|Installed).*)$",
    re.MULTILINE,
)
# uv announces what is large or must be built, and then that it has it.
BEGUN = re.compile(r"^ *(?:Downloading|Building) ", re.MULTILINE)
DONE = re.compile(r"^ *(?:Downloaded|Built) ", re.MULTILINE)
COMPILING = re.compile(r"^Compiling '", re.MULTILINE)


def last_step(log: str) -> str:
    """Return the last thing that ``log`` tells of, in one line of a terminal."""
    if compiled := len(COMPILING.findall(log)):
        return f"{compiled} files compiled"
    steps = STEP.findall(log)
    if not steps:
        return "starting"
    done = len(DONE.findall(log))
    if done and steps[-1].startswith(("Downloading", "Building")):
        return f"{done} of {len(BEGUN.findall(log))} large packages ready; {steps[-1][:40]}"
    title, _, packages = steps[-1].partition("collected packages:")
    return f"{title}{packages.count(',') + 1} packages" if packages else title[:70]
