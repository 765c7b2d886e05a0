"""The script of docs/slurm.md in a real SLURM with three nodes on this machine; its router only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from epd_portable.config.secret import make_secret_file
from epd_portable.launch.plan.ports import port_source

pytestmark = [pytest.mark.full, pytest.mark.needs_slurm, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 120
NODES = ("n1", "n2", "n3")
SLURM = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={0}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={1} CPUs=2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={2} CPUs=2
NodeName=n3 NodeHostname=localhost NodeAddr=127.0.0.1 Port={3} CPUs=2
PartitionName=all Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP
"""


def until(words: str, *command: str) -> str:
    """Ask a command until it says some words; return what it said."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if re.search(words, ended.stdout):
            return ended.stdout
        assert time.monotonic() < end_s, (ended.stdout, ended.stderr)
        time.sleep(0.5)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A controller and three nodes."""
    free = port_source("0000005b")
    file = tmp_path / "slurm.conf"
    file.write_text(SLURM.format(*(free() for _ in range(4)), folder=tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(file))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    commands = [("slurmctld", "-D"), *(("slurmd", "-D", "-N", node) for node in NODES)]
    for node in NODES:
        (tmp_path / f"spool-{node}").mkdir()
    with (tmp_path / "slurm.log").open("w") as log:
        daemons = [subprocess.Popen(each, stdout=log, stderr=log) for each in commands]
    try:
        until(r"3 +idle", "sinfo", "--noheader")
        yield tmp_path
    finally:
        # Jobs outlive the daemons.
        subprocess.run(["scancel", "--name=epd"], check=False)
        until("^$", "squeue", "--noheader")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=DEADLINE_S)


def test_the_script_starts_a_router_that_a_cancelled_job_lets_end(cluster: Path) -> None:
    page = (ROOT / "docs/slurm.md").read_text()
    [script] = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (cluster / "epd.sbatch").write_text(script)
    make_secret_file(str(cluster / "secret"))
    port, output = port_source("0000005c")(), cluster / "out"
    given = f"PLATFORM=cpu,CONFIG={ROOT}/configs/1e1pd.yaml,SECRET={cluster}/secret,PORT={port}"
    job = subprocess.run(
        [
            *("sbatch", "--parsable", "--nodes=1", f"--output={output}"),
            f"--export=ALL,{given},LAUNCHERS=0,ROUTER_HOST=127.0.0.1",
            str(cluster / "epd.sbatch"),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    until("ready:", "cat", str(output))
    health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=30, trust_env=False)
    assert health.status_code == 503
    subprocess.run(["scancel", job], check=True)
    until("\nstopped\n", "cat", str(output))
    until("JobState=CANCELLED", "scontrol", "show", "job", job)
