"""Supervise the plan in the JSON file that is named, as ``epd-launch up`` does with its own."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

from epd_portable.config.front import FrontSection
from epd_portable.config.schema import Launch
from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError
from epd_portable.launch.commands.command_line import printer
from epd_portable.launch.plan.processes import Plan, ProcessSpec
from epd_portable.launch.run import lifecycle, supervisor


def main() -> None:
    raw = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    folder = os.open(raw["temp_dir"], os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # By it others know that the launcher lives.
    specs = tuple(ProcessSpec(**{**spec, "argv": tuple(spec["argv"])}) for spec in raw["processes"])
    plan = Plan(
        run_id=raw["run_id"],
        platform="cpu",
        model="none",
        url=next((f"{spec.url}/v1" for spec in specs if spec.role == "front"), "nowhere"),
        processes=specs,
        warnings=(),
        joins=tuple(raw.get("joins", ())),
        members=tuple(
            {
                "name": spec.name,
                "role": spec.role,
                "url": spec.url,
                "control": "tcp://127.0.0.1:1" if spec.role == "prefill-decode" else "",
            }
            for spec in specs
            if raw.get("joins") or spec.name in raw.get("apart", ())
        ),
    )
    if "pauses_s" in raw:
        lifecycle.FIRST_PAUSE_S, lifecycle.LONGEST_PAUSE_S = raw["pauses_s"]
    supervisor.NOTE_EVERY_S = raw.get("note_every_s", supervisor.NOTE_EVERY_S)
    running = supervisor.Supervisor(
        plan,
        Launch.model_validate(raw["launch"]),
        secret=Secret(raw.get("secret", "0" * 64)),
        drain_s=raw.get("drain_s", FrontSection().drain_s),
        log_dir=Path(raw["log_dir"]),
        temp_dir=Path(raw["temp_dir"]),
        say=printer(as_json=raw.get("as_json", False)),
    )
    try:
        running.run()
    except LaunchError as error:
        print(f"failed: {error}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
