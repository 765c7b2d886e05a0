"""No room: in /dev/shm, on the disk that traces go to, and in files at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import httpx

from epd_portable.launch.plan.machine import port_source
from epd_portable.launch.run import sessions
from epd_portable.transfer.pool import SHM_FOLDER
from tests.kit.commands import Ended, run
from tests.kit.shm import ROOT, SHM_BYTES, small_shm

DEADLINE_S = 60.0


def python(code: str, *, before: tuple[str, ...] = (), **env: str) -> Ended:
    """Run code in a process of its own."""
    return run(*before, sys.executable, "-c", code, PYTHONPATH=str(ROOT), **env)


POOL = """
import sys
from pathlib import Path
from epd_portable.transfer.pool import SharedMemory
from epd_portable.errors import CapacityError
try:
    SharedMemory.create("epd-test", int(sys.argv[1]) if len(sys.argv) > 1 else {nbytes})
except CapacityError as error:
    print(error)
print(sorted(path.name for path in Path("/dev/shm").iterdir()))
"""


def test_pool_larger_than_shm_is_refused_and_leaves_no_file() -> None:
    done = python(POOL.format(nbytes=SHM_BYTES + 4096), before=small_shm())
    assert done.returncode == 0, done.stderr
    refusal, left = done.stdout.splitlines()
    assert str(SHM_BYTES + 4096) in refusal and "transfer.pool_bytes" in refusal
    assert left == "[]"


SHRINKING = """
import os
from epd_portable.transfer.pool import SharedMemory
pool = SharedMemory.create("epd-test", 512 << 10)
filler = os.open("/dev/shm/filler", os.O_WRONLY | os.O_CREAT)
try:
    while os.write(filler, b"x" * 4096):
        pass
except OSError as error:
    print(error.errno)
pool.tensor(0, pool.nbytes).fill_(7)
print(int(pool.tensor(0, pool.nbytes).sum()))
"""


def test_pool_has_its_memory_when_shm_fills_later() -> None:
    """Memory that is given only when it is first touched would end the process there (SIGBUS)."""
    done = python(SHRINKING, before=small_shm())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["28", str(7 * (512 << 10))]


WORKER = """
import os, sys
from pathlib import Path
from epd_portable.config.instance import InstanceConfig
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.worker_endpoint import WorkerEndpoint
from epd_portable.errors import CapacityError
from epd_portable.platforms import registry
with open("/dev/shm/filler", "wb") as filler:
    os.posix_fallocate(filler.fileno(), 0, os.statvfs("/dev/shm").f_bavail * 4096)
config = InstanceConfig(
    instance="prefill_decode-0", platform="cpu", pool="epd-test", pool_bytes=4096,
    path="collective",
)
try:
    WorkerEndpoint(config, DeviceCopies(registry.get("cpu")))
except CapacityError as error:
    print(error)
print(sorted(path.name for path in Path("/dev/shm").iterdir()))
"""


def test_worker_without_space_reports_it_and_leaves_no_file() -> None:
    done = python(WORKER, before=small_shm())
    assert done.returncode == 0, done.stderr
    refusal, left = done.stdout.splitlines()
    assert "/dev/shm" in refusal and "enlarge" in refusal
    assert left == "['filler']"


TRACE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
from epd_portable import log
log.configure()
for number in range(20):
    log.trace("some.event", number=number)
print("still here")
"""


def test_a_full_disk_ends_the_trace_and_not_the_process(tmp_path: Path) -> None:
    done = python(TRACE, EPD_TRACE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr
    assert done.stderr.count("EPD_TRACE_DIR") == 1, done.stderr
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size <= 200


def test_a_pool_larger_than_files_may_be_is_refused() -> None:
    name = f"epd-test-{uuid.uuid4().hex[:12]}"
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    done = python(limited + POOL.format(nbytes=1 << 20).replace("epd-test", name))
    assert done.returncode == 0, done.stderr
    assert "receive pool of 1048576 bytes" in done.stdout
    assert not (SHM_FOLDER / name).exists()


def test_launcher_restarts_processes_without_writable_output(tmp_path: Path) -> None:
    run_id = secrets.token_hex(4)
    port = port_source(run_id)()
    server = [sys.executable, "-m", "tests.integration.launch.front", f"--port={port}"]
    server.append(f"--secret-file={tmp_path / 'secret'}")
    (tmp_path / "secret").write_text("0" * 64)
    (tmp_path / "secret").chmod(0o600)
    spec = {"name": "front-0", "role": "front", "argv": server, "env": {}, "ports": {}}
    plan = {
        "run_id": run_id,
        "processes": [{**spec, "url": f"http://127.0.0.1:{port}"}],
        "launch": {},
        "pauses_s": [0.1, 0.1],
        "log_dir": str(tmp_path),
        "temp_dir": str(tmp_path / "temp"),
    }
    (tmp_path / "temp").mkdir()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.launch.run_plan", tmp_path / "plan.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert launcher.stdout is not None
    with launcher.stdout as lines:
        assert any(line.startswith("ready:") for line in lines)
    try:
        first = serving(run_id, port)
        os.kill(first, signal.SIGKILL)
        assert serving(run_id, port, but=first) != first
        assert launcher.poll() is None
    finally:
        launcher.terminate()
        launcher.wait(DEADLINE_S)
    assert not sessions.members([], run_id)


def serving(run_id: str, port: int, *, but: int = 0) -> int:
    """Wait for a process of a run that answers on a port; return its pid."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < end_s, "nobody serves"
        wanted = f"--port={port}".encode()
        for pid in sessions.members([], run_id):
            with contextlib.suppress(OSError, httpx.RequestError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if wanted in words and pid != but:
                    httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                    return pid
        time.sleep(0.05)
