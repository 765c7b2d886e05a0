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
    temp_dir = Path(raw.pop("temp_dir"))
    folder = os.open(temp_dir, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # By it others know that the launcher lives.
    specs = tuple(
        ProcessSpec(**{**spec, "argv": tuple(spec["argv"])}) for spec in raw.pop("processes")
    )
    joins, apart = tuple(raw.pop("joins", ())), raw.pop("apart", ())
    plan = Plan(
        run_id=raw.pop("run_id"),
        platform="cpu",
        model="none",
        url=next((f"{spec.url}/v1" for spec in specs if spec.role == "front"), "nowhere"),
        processes=specs,
        warnings=(),
        joins=joins,
        members=tuple(
            {
                "name": spec.name,
                "role": spec.role,
                "url": spec.url,
                "control": "tcp://127.0.0.1:1" if spec.role == "prefill-decode" else "",
            }
            for spec in specs
            if joins or spec.name in apart
        ),
    )
    if "pauses_s" in raw:
        lifecycle.FIRST_PAUSE_S, lifecycle.LONGEST_PAUSE_S = raw.pop("pauses_s")
    supervisor.NOTE_EVERY_S = raw.pop("note_every_s", supervisor.NOTE_EVERY_S)
    supervisor.DRAIN_MARGIN_S = raw.pop("drain_margin_s", supervisor.DRAIN_MARGIN_S)
    running = supervisor.Supervisor(
        plan,
        Launch.model_validate(raw.pop("launch")),
        secret=Secret(raw.pop("secret", "0" * 64)),
        drain_s=raw.pop("drain_s", FrontSection().drain_s),
        log_dir=Path(raw.pop("log_dir")),
        temp_dir=temp_dir,
        say=printer(as_json=raw.pop("as_json", False)),
    )
    if raw:
        print(f"failed: plan has unknown keys: {', '.join(raw)}", flush=True)
        sys.exit(1)
    try:
        running.run()
    except LaunchError as error:
        print(f"failed: {error}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
