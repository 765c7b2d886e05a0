"""deploy/slurm/epd.sbatch in a real SLURM of three nodes on this machine, with real engines."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from epd_portable.launch.plan.machine import port_source
from tests.e2e.asking import ask, picture
from tests.e2e.cases import ASK
from tests.e2e.engines import shared_memory

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs_slurm,
    pytest.mark.needs_vllm,
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 400
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
SelectType=select/cons_tres
TaskPlugin=task/affinity
SwitchType=switch/none
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={1} CPUs=2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={2} CPUs=2
NodeName=n3 NodeHostname=localhost NodeAddr=127.0.0.1 Port={3} CPUs=2
PartitionName=all Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP
"""
TOPOLOGY = """
model: demo
instances: {encode: {count: 1}, prefill_decode: {count: 1}}
transfer: {pool_bytes: 16MiB}
front: {drain_s: 20, elastic_encode: false, item_outcomes: true}
engine_args: {max_model_len: 1024}
platform: {cpu: {engine_args: {dtype: bfloat16, enforce_eager: true}}}
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


def launched(config: Path, front: str) -> list[psutil.Process]:
    """Return the launcher of a topology, the gateway to its front, and their children."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if {str(config), front} & {*words} and Path(words[0]).name.startswith("python"):
                found += [process, *process.children(recursive=True)]
    return found


def test_job_serves_an_image_and_leaves_nothing_when_cancelled(cluster: Path) -> None:
    shutil.copy(ROOT / "deploy/slurm/epd.sbatch", cluster / "epd.sbatch")
    config, output = cluster / "topology.yaml", cluster / "out"
    config.write_text(TOPOLOGY)
    free = port_source("0000005c")
    port, front_port = free(), free()
    url, front = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{front_port}"
    given = f"PLATFORM=cpu,CONFIG={config},PORT={port},FRONT_PORT={front_port},HOSTS=127.0.0.1"
    job = subprocess.run(
        [
            *("sbatch", "--parsable", "--nodes=1", f"--output={output}", f"--export=ALL,{given}"),
            str(cluster / "epd.sbatch"),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    until(r"ready:[\s\S]*ready:", "cat", str(output))
    assert ask(url, [picture(1), ASK]).sources == ["transfer"]
    processes = launched(config, front)
    # SLURM binds a job to the cores that it has asked for.
    assert set().union(*(each.cpu_affinity() for each in processes)) == os.sched_getaffinity(0)
    files = shared_memory(processes)
    assert files
    subprocess.run(["scancel", job], check=True)
    until("JobState=CANCELLED", "scontrol", "show", "job", job)
    assert psutil.wait_procs(processes, timeout=DEADLINE_S)[1] == []
    assert output.read_text().splitlines().count("stopped") == 2
    assert not [file for file in files if file.exists()]
