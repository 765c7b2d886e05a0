"""Runs the section "Two hosts" of docs/deploy.md, from its own text, on one machine.

    python -m ci.two_hosts

Each host is a network namespace with a ``/dev/shm`` and a home folder of its own; they see each
other by the addresses of the page. Needs root, ``ip`` and an environment (`make env`). Whatever
happens, processes, namespaces and folders are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/deploy.md"
BLOCK = re.compile(r"^```bash\n# ([\w.]+): (\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HOSTS = ("10.0.0.1", "10.0.0.2")
START_S = 420.0
STOP_S = 120.0
ASK_S = 120.0


def blocks(text: str) -> dict[str, tuple[str, str]]:
    """Return ``(host, script)`` of each step of the section by its name.

    Raises:
        ValueError: The section has no such steps.
    """
    section = text.partition("\n## Two hosts\n")[2].partition("\n## ")[0]
    found = {name: (host, script) for host, name, script in BLOCK.findall(section)}
    if list(found) != ["install", "secret", "serve", "join", "ask"]:
        raise ValueError(f"docs/deploy.md, Two hosts: found the steps {', '.join(found)}")
    return found


class Machine:
    """Two hosts on one machine.

    Args:
        folder: For their homes and logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = {host: f"epd-{os.getpid()}-{index}" for index, host in enumerate(HOSTS)}

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Make both namespaces and the link between them; remove them at the end."""
        one, other = self._names.values()
        try:
            for host, name in self._names.items():
                self.home(host).mkdir()
                _run("ip", "netns", "add", name)
            ends = ("type", "veth", "peer", "name", "epd0", "netns", other)
            _run("ip", "link", "add", "epd0", "netns", one, *ends)
            for host, name in self._names.items():
                _run("ip", "-n", name, "address", "add", f"{host}/24", "dev", "epd0")
                for device in ("lo", "epd0"):
                    _run("ip", "-n", name, "link", "set", device, "up")
            yield
        finally:
            for name in self._names.values():
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def home(self, host: str) -> Path:
        """Return a host's home folder."""
        return self._folder / host

    def start(self, host: str, script: str, log: Path) -> subprocess.Popen[bytes]:
        """Start the commands of a block on a host."""
        # What scp would do between two machines.
        scp = f'scp() {{ cp -p "$2" "{self._folder}/${{3%:}}/"; }}'
        # `ip netns exec` gives a mount namespace, too, so this /dev/shm is the host's own.
        prepared = f"set -e; mount -t tmpfs tmpfs /dev/shm; {scp}\n{script}"
        environment = {
            **os.environ,
            "HOME": str(self.home(host)),
            "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            # The namespaces have no way out.
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("wb") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], "bash", "-c", prepared],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def main() -> None:
    """Run the section; exit status 1 when something is not as the page says."""
    steps = blocks(PAGE.read_text("utf-8"))
    folder = Path(tempfile.mkdtemp(prefix="epd-two-hosts-"))
    machine = Machine(folder)
    running: list[subprocess.Popen[bytes]] = []
    try:
        with machine.up():
            print("install: skipped, this checkout has its environment", flush=True)
            _finish(machine, "secret", steps, folder)
            for name in ("serve", "join"):
                host, script = steps[name]
                log = folder / f"{name}.log"
                # A single command, which the shell becomes: signals reach the launcher itself.
                running.append(machine.start(host, f"exec {script.lstrip()}", log))
                print(f"{name}: {_wait_ready(running[-1], log)}", flush=True)
            answer = _finish(machine, "ask", steps, folder)
            for expected in ("encode-0@10.0.0.2", '"path":"tcp"', '"source":"transfer"'):
                if expected not in answer.replace('": ', '":'):
                    sys.exit(f"ask: {expected} is not in the answer:\n{answer}")
            for process, name in zip(reversed(running), ("join", "serve"), strict=True):
                process.send_signal(signal.SIGINT)
                status = process.wait(STOP_S)
                said = (folder / f"{name}.log").read_text("utf-8", "replace")
                print(f"{name}: ended with {status}", flush=True)
                if status:
                    sys.exit(said[-4000:])
                if name == "join":
                    host, script = steps["ask"]
                    # Another picture: the first one is in a cache.
                    steps["ask"] = host, script.replace("draw(20)", "draw(21)")
                    left = _finish(machine, "ask", steps, folder)
                    if "encode-0@10.0.0.2" in left or '"source":"local"' not in left:
                        sys.exit(f"without its encoder the first host answered:\n{left}")
                    print("ask: the first host encodes by itself", flush=True)
    finally:
        for process in running:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
        shutil.rmtree(folder, ignore_errors=True)


def _finish(machine: Machine, name: str, steps: dict[str, tuple[str, str]], folder: Path) -> str:
    host, script = steps[name]
    log = folder / f"{name}.log"
    status = machine.start(host, script, log).wait(ASK_S)
    said = log.read_text("utf-8", "replace")
    print(f"{name}: {said.strip()[-1500:]}", flush=True)
    if status:
        sys.exit(f"{name} ended with {status}")
    return said


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        text = log.read_text("utf-8", "replace")
        for line in text.splitlines():
            if line.startswith("ready:"):
                return line
        if process.poll() is not None:
            sys.exit(f"it ended with {process.returncode}:\n{text[-4000:]}")
        time.sleep(0.5)
    sys.exit(f"not ready after {START_S:g} s:\n{text[-4000:]}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
