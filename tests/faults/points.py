"""The named points of the protocol, and who is struck there; tests/faults/README.md."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

POINTS = (
    "encode_job",
    "request.arrived",
    "item.reserved",
    "encode.begin",
    "transfer.begun",
    "transfer.written",
    "item.landed",
    "item.placed",
)
"""Events of the trace, in the order of an item's way."""


@dataclass(frozen=True)
class Victim:
    """A process that is struck.

    Attributes:
        name: For people.
        role: Beginning of the instance's name; empty for the launcher.
        part: Which process of the instance.
    """

    name: str
    role: str
    part: str = ""

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


ENCODER_WORKER = Victim("encoder worker", "encode-", "worker")
ENCODER_SCHEDULER = Victim("encoder scheduler", "encode-", "scheduler")
PD_WORKER = Victim("PD worker", "prefill_decode-", "worker")
PD_SCHEDULER = Victim("PD scheduler", "prefill_decode-", "scheduler")
FRONT = Victim("front", "front")
LAUNCHER = Victim("launcher", "launcher")
VICTIMS = (ENCODER_WORKER, ENCODER_SCHEDULER, PD_WORKER, PD_SCHEDULER, FRONT, LAUNCHER)


def name_process(folder: Path, name: str, pid: int) -> None:
    """Say which process bears a name; whoever looks meanwhile finds the one before."""
    fresh = folder / "naming" / f"{name}-{pid}"
    fresh.write_text(str(pid))
    fresh.rename(folder / "pids" / name)


class Faults:
    """Strikes in the processes that run with ``hooks/sitecustomize.py`` and this folder.

    Args:
        folder: For tickets and pids; made here.
    """

    HOOKS = Path(__file__).parent / "hooks"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pids").mkdir(parents=True)
        (folder / "naming").mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make processes obey."""
        return {"EPD_TEST_FAULTS": str(self.folder)}

    def know(self, name: str, pid: int) -> None:
        """Name a process that does not tell its pid itself."""
        name_process(self.folder, name, pid)

    def arm(
        self,
        point: str,
        victim: Victim,
        *,
        nth: int = 1,
        other: int = 0,
        signum: signal.Signals = signal.SIGKILL,
    ) -> None:
        """Strike at the n-th occurrence of a point from now on.

        Args:
            point: An event.
            victim: Who.
            nth: Counted over all processes.
            other: Index of the instance, if the point is not at one of the victim's role.
            signum: What is sent.
        """
        self.disarm()
        name = f"{victim.role}{other}" if victim.role.endswith("-") else victim.role
        order = {"role": victim.role, "part": victim.part, "instance": name, "signal": signum}
        # The highest first: whoever looks in between finds them in order.
        for number in range(nth, 0, -1):
            fresh = self.folder / "fresh"
            fresh.write_text(json.dumps(order))
            fresh.rename(self.folder / f"{point}.{number}")

    def struck(self) -> dict[str, object] | None:
        """Return who was struck, by whom; ``None`` if it has not happened yet."""
        try:
            found: dict[str, object] = json.loads((self.folder / "struck").read_text())
        except FileNotFoundError:
            return None
        return found

    def resume(self) -> None:
        """Let a process that was stopped go on."""
        struck = self.struck()
        assert struck is not None, "nobody was stopped"
        os.kill(int(str(struck["pid"])), signal.SIGCONT)

    def disarm(self) -> None:
        """Forget strikes that have not happened, and those that have."""
        for path in self.folder.iterdir():
            if path.is_file():
                path.unlink()
