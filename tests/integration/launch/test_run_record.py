"""Reports of a launcher on its run: at *ready*, and in the file of ``epd-launch status``."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from epd_portable.launch.commands.status import run_table
from epd_portable.launch.run.running import STATE_FILE, ProcessRecord, RunRecord
from tests.integration.launch.conftest import Run

Launch = Callable[..., Run]
SERVERS: dict[str, list[str]] = {"encode-0": [], "front": []}
PAUSES_S = (0.1, 30.0)


def read(run: Run) -> RunRecord:
    return RunRecord.model_validate_json((run.temp_dir / STATE_FILE).read_text("utf-8"))


def of(run: Run, name: str) -> ProcessRecord:
    return next(each for each in read(run).processes if each.name == name)


def test_run_record_has_addresses_and_ends_of_instances(launch: Launch) -> None:
    run = launch(SERVERS, pauses_s=PAUSES_S)
    url = f"http://127.0.0.1:{run.ports['front']}/v1"
    assert run.lines[-1].startswith(f"ready: {url} (1 encode, cpu) in ")
    line = run.wait_for("encode-0")
    assert line.split() == ["encode-0", "encode", f"http://127.0.0.1:{run.ports['encode-0']}"]
    run.until(lambda: read(run).phase == "serving", "it serves")
    found = of(run, "encode-0")
    assert (found.state, found.restarts, found.pid) == ("up", 0, run.pid_of("encode-0"))
    assert found.started_s is not None
    assert Path(found.log) == run.log_dir / "encode-0.log"

    os.kill(found.pid, signal.SIGKILL)
    run.until(lambda: of(run, "encode-0").restarts == 1, "it is started again")
    run.until(lambda: of(run, "encode-0").state == "up", "it has recovered")
    again = of(run, "encode-0")
    assert again.pid not in (0, found.pid)
    assert again.started_s is not None and again.started_s > found.started_s

    # A folder that takes no file ends no topology: as on a full disk, and for root too.
    (run.temp_dir / f"{STATE_FILE}.new").mkdir()
    os.kill(again.pid, signal.SIGKILL)
    run.wait_for("`epd-launch status` shows this run as it was")
    run.wait_for("encode-0 has recovered")
    run.stop()


def test_status_shows_why_items_are_refused(launch: Launch) -> None:
    problem = "pd-0 refuses the items of encode-0: encode-0 differs in the dtype (--dtype)"
    run = launch({**SERVERS, "front": [f"--problem={problem}"]})
    run.until(lambda: of(run, "encode-0").problem == problem, "the record has the reason")
    assert run_table(read(run)).splitlines()[-1] == f"encode-0: {problem}"
    run.stop()


def test_a_run_is_told_to_programs_as_one_object_a_line(launch: Launch) -> None:
    run = launch(SERVERS, as_json=True, pauses_s=PAUSES_S, until='"event": "ready"')
    os.kill(run.pid_of("encode-0"), signal.SIGKILL)
    run.wait_for('"event": "recovered"')
    run.stop()
    told = [json.loads(line) for line in run.all_lines()]
    assert all(each["schema_version"] == 1 and each["text"] for each in told)
    assert all(datetime.fromisoformat(each["time"]).tzinfo for each in told)
    by_event = {each["event"]: each for each in told}
    assert list(by_event)[-6:] == [
        "ready",
        "exited",
        "recovered",
        "stopping",
        "draining",
        "stopped",
    ]
    ready = by_event["ready"]
    assert ready["url"] == f"http://127.0.0.1:{run.ports['front']}/v1"
    assert {each["name"]: each["url"] for each in ready["processes"]} == {
        name: f"http://127.0.0.1:{port}" for name, port in run.ports.items()
    }
    exited = by_event["exited"]
    assert (exited["instance"], exited["restart_in_s"]) == ("encode-0", 0.1)
    assert exited["reason"].startswith("was killed by SIGKILL")
