"""Runs the section "Two hosts" of docs/deploy.md, from its own text, on one machine; then faults.

    python -m ci.two_hosts

Under load processes of either host are killed and stopped. Each request must end with the right
response, or with an error that names its cause.

Each host is a network namespace with a ``/dev/shm`` and a home folder of its own; they see each
other by the addresses of the page. Needs root, ``ip`` and an environment (`make env`). Whatever
happens, processes, namespaces and folders are removed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/deploy.md"
BLOCK = re.compile(r"^```bash\n# ([\w.]+): (\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HOSTS = ("10.0.0.1", "10.0.0.2")
START_S = 420.0
STOP_S = 120.0
ASK_S = 120.0
LOAD_S = 3.0
STOPPED_S = 8.0
CLIENTS = 4


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
            _faults(machine, folder)
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


def _faults(machine: Machine, folder: Path) -> None:
    """Kill and stop processes of either host under load; exit where a response is wrong."""
    log, stop = folder / "load.log", folder / "stop"
    script = f"exec python -m ci.two_hosts load {HOSTS[0]} {stop}"
    loading = machine.start(HOSTS[0], script, log)
    try:
        for host, name in ((HOSTS[1], f"encode-0@{HOSTS[1]}"), (HOSTS[0], "front")):
            for fault in ("kill", "stop"):
                time.sleep(LOAD_S)
                pid = _pid_of(machine, host, name)
                print(f"faults: {fault} {name}", flush=True)
                if fault == "kill":
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.killpg(pid, signal.SIGSTOP)
                    time.sleep(STOPPED_S)
                    os.killpg(pid, signal.SIGCONT)
                _wait_transfers(log)
    finally:
        stop.touch()
        loading.wait(ASK_S)
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    print(f"faults: {Counter(each['what'] for each in lines)}", flush=True)
    slowest = max(each["s"] for each in lines)
    print(f"faults: {len(lines)} requests, slowest {slowest:.1f} s", flush=True)
    wrong = [each for each in lines if each["wrong"]]
    print(f"faults: {len(wrong)} of {len(lines)} differ from what the image shows", flush=True)
    # The model is right about at least 95 % of images that it has not seen.
    if len(wrong) > 0.05 * len(lines):
        sys.exit(f"faults: {wrong[:5]}")


def _pid_of(machine: Machine, host: str, name: str) -> int:
    """Return the process of that name, when it is up."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        shown = subprocess.run(
            [ROOT / ".venv/bin/epd-launch", "status", "--json"],
            env={**os.environ, "HOME": str(machine.home(host))},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for run in json.loads(shown or "{}").get("runs", ()):
            for each in run["processes"]:
                if each["name"] == name and each["state"] == "up":
                    return int(each["pid"])
        time.sleep(0.5)
    sys.exit(f"faults: {name} is not up after {START_S:g} s")


def _wait_transfers(log: Path) -> None:
    """Return when new requests get their items from the other host again."""
    begin, end = log.stat().st_size, time.monotonic() + START_S
    while time.monotonic() < end:
        text = log.read_bytes()[begin:].decode()
        if text.count('"what": "transfer"') >= 5:
            return
        time.sleep(0.5)
    sys.exit(f"faults: no item came from the other host for {START_S:g} s")


def _load(host: str, stop: Path) -> None:
    """Send requests for images with known contents until a file is there; print each end."""
    from epd_portable.demo.pictures import QUESTIONS, QuestionKind, draw

    lock, seeds = threading.Lock(), iter(range(1000, 10**9))

    def ask(seed: int) -> tuple[str, str]:
        image, kind = draw(seed), QuestionKind.DESCRIBE
        content = [
            {"type": "image_url", "image_url": {"url": image.data_url()}},
            {"type": "text", "text": QUESTIONS[kind]},
        ]
        body: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 24}
        body["messages"] = [{"role": "user", "content": content}]
        connection = http.client.HTTPConnection(host, 8000, timeout=ASK_S)
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"content-type": "application/json"},
            )
            response = connection.getresponse()
            found = json.loads(response.read())
        except (ConnectionError, http.client.HTTPException, json.JSONDecodeError) as error:
            return "no connection", "" if isinstance(error, ConnectionError) else repr(error)
        except TimeoutError:
            return "no response", f"none in {ASK_S:g} s"
        finally:
            connection.close()
        if response.status != 200:
            named = response.status in (429, 500, 503) and found.get("error", {}).get("message")
            return f"status {response.status}", "" if named else str(found)
        said = found["choices"][0]["message"]["content"]
        item = ((found.get("ec_transfer_params") or {}).get("items") or [{}])[0]
        right = said == image.scene.answer(kind)
        return item.get("source", "?"), "" if right else f"{said!r} of {seed}"

    def run() -> None:
        while not stop.exists():
            begun = time.monotonic()
            with lock:
                seed = next(seeds)
            what, wrong = ask(seed)
            taken = round(time.monotonic() - begun, 2)
            with lock:
                print(json.dumps({"what": what, "wrong": wrong, "s": taken}), flush=True)
            if what == "no connection":
                time.sleep(0.2)

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


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
    if sys.argv[1:2] == ["load"]:
        _load(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
