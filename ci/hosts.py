"""Runs the steps of two sections, from their own text, for four hosts; then faults.

    python -m ci.hosts            Two hosts, docs/remote-encoder.md
    python -m ci.hosts prefill    Prefill on another host, docs/hosts.md

Two hosts have a front and an engine that generates. The two others have engines that both fronts
share: two that encode, or one that prefills and one that encodes. A gateway forwards to both
fronts. Under load through the gateway processes are killed and stopped, and a host is cut off.
Each request must end with the right response, or with an error that names its cause.

Each host is a network namespace with a ``/dev/shm`` and a home folder of its own, on one bridge.
Needs root, ``ip`` and an environment (`make env`). In any case, processes, namespaces and
folders are removed.
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
PAGES = {
    "Two hosts": ROOT / "docs/remote-encoder.md",
    "Prefill on another host": ROOT / "docs/hosts.md",
}
"""Page of each section."""
BLOCK = re.compile(r"^```bash\n# ([\w.]+): (\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FRONTS = ("10.0.0.1", "10.0.0.3")
SHARED = ("10.0.0.2", "10.0.0.4")
GATEWAY = f"http://{FRONTS[0]}:8080"
SMALL = "--set engine_args.kv_cache_memory_bytes=134217728 --set env.UCX_TLS=tcp"
"""NIXL touches all memory of the KV; and UCX would use memory of the machine, not the network."""
START_S = 420.0
STOP_S = 120.0
ASK_S = 120.0
LOAD_S = 3.0
STOPPED_S = 8.0
CUT_S = 20.0
CLIENTS = 4


STEPS = {
    "Two hosts": ["install", "secret", "serve", "join", "ask"],
    "Prefill on another host": ["decode", "prefill", "encode"],
}
"""Steps of each section."""


def blocks(title: str) -> dict[str, tuple[str, str]]:
    """Return ``(host, script)`` of each step of a section by its name.

    Raises:
        ValueError: The section has no such steps.
    """
    text = PAGES[title].read_text("utf-8")
    section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = {name: (host, script) for host, name, script in BLOCK.findall(section)}
    if list(found) != STEPS[title]:
        raise ValueError(f"{PAGES[title]}, {title}: found the steps {', '.join(found)}")
    return found


class Machine:
    """Several hosts on one machine.

    Args:
        folder: For their homes and logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bridge = f"epd-{os.getpid()}-bridge"
        hosts = (*FRONTS, *SHARED)
        self._names = {host: f"epd-{os.getpid()}-{host[-1]}" for host in hosts}

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Make a namespace for each host, and the bridge between them; remove them at the end."""
        try:
            _run("ip", "netns", "add", self._bridge)
            _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
            for host, name in self._names.items():
                self.home(host).mkdir()
                _run("ip", "netns", "add", name)
                port = f"port{host[-1]}"
                ends = ("type", "veth", "peer", "name", "epd0", "netns", name)
                _run("ip", "link", "add", port, "netns", self._bridge, *ends)
                _run("ip", "-n", self._bridge, "link", "set", port, "master", "bridge", "up")
                _run("ip", "-n", name, "address", "add", f"{host}/24", "dev", "epd0")
                for device in ("lo", "epd0"):
                    _run("ip", "-n", name, "link", "set", device, "up")
            yield
        finally:
            for name in (*self._names.values(), self._bridge):
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    @contextlib.contextmanager
    def cut_off(self, host: str) -> Iterator[None]:
        """Let no packet from or to a host through."""
        port = f"port{host[-1]}"
        _run("ip", "-n", self._bridge, "link", "set", port, "down")
        try:
            yield
        finally:
            _run("ip", "-n", self._bridge, "link", "set", port, "up")

    def home(self, host: str) -> Path:
        """Return a host's home folder."""
        return self._folder / host

    def environment(self, host: str) -> dict[str, str]:
        """Return the variables of a host's commands; runs of other hosts are not seen from it."""
        return {**os.environ, "HOME": str(self.home(host)), "TMPDIR": str(self.home(host))}

    def start(self, host: str, script: str, log: Path) -> subprocess.Popen[bytes]:
        """Start the commands of a block on a host."""
        # What scp would do between two machines.
        scp = f'scp() {{ cp -p "$2" "{self._folder}/${{3%:}}/"; }}'
        # `ip netns exec` gives a mount namespace, too, so this /dev/shm is the host's own.
        prepared = f"set -e; mount -t tmpfs tmpfs /dev/shm; {scp}\n{script}"
        environment = {
            **self.environment(host),
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


def commands(steps: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return ``(host, command)`` of what runs on the hosts by its name, from those of the page."""
    prefills = "prefill" in steps
    (first, serve) = steps["decode" if prefills else "serve"]
    joins = [steps[each] for each in (("prefill", "encode") if prefills else ("join", "join"))]
    fronts = [f"http://{host}:8000" for host in FRONTS]
    found = {f"front {host}": (host, serve.replace(first, host)) for host in FRONTS}
    for host, (second, join) in zip(SHARED, joins, strict=True):
        command = join.replace(second, host).replace(fronts[0], f"'[{', '.join(fronts)}]'")
        found[f"engine {host}"] = host, command
    if prefills:
        found = {name: (host, f"{each.rstrip()} {SMALL}") for name, (host, each) in found.items()}
    named = " ".join(f"--front {each}" for each in fronts)
    command = f"epd-launch gateway {named} --host {FRONTS[0]} --port {GATEWAY.rpartition(':')[2]}"
    return {**found, "gateway": (FRONTS[0], command)}


def main(*, prefills: bool = False) -> None:
    """Run a section; exit status 1 when something is not as the page states."""
    steps = blocks("Two hosts")
    served = blocks("Prefill on another host") if prefills else steps
    folder = Path(tempfile.mkdtemp(prefix="epd-hosts-"))
    machine = Machine(folder)
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with machine.up():
            print("install: skipped, this checkout has its environment", flush=True)
            _finish(machine, "secret", steps, folder)
            for host in (FRONTS[1], *SHARED):
                shutil.copy2(machine.home(FRONTS[0]) / "epd.secret", machine.home(host))
            for name, (host, command) in commands(served).items():
                log = folder / f"{name}.log"
                # A single command, which the shell becomes: signals reach the launcher itself.
                running[name] = machine.start(host, f"exec {command.lstrip()}", log)
                if name != "gateway":
                    print(f"{name}: {_wait_ready(running[name], log)}", flush=True)
            answer = _finish(machine, "ask", steps, folder)
            by_transfer = "encode-0@10.0.0.", '"path":"tcp"', '"source":"transfer"'
            # A decode engine finds the image in the KV that it reads.
            for expected in ('"source":"prefix_cache"',) if prefills else by_transfer:
                if expected not in answer.replace('": ', '":'):
                    sys.exit(f"ask: {expected} is not in the response:\n{answer}")
            shared = f"{'prefill' if prefills else 'encode'}-0@{SHARED[0]}"
            _faults(machine, folder, shared, "prefix_cache" if prefills else "transfer")
            for name in ("gateway", *(f"engine {host}" for host in SHARED)):
                _stop(name, running[name], folder)
            host, script = steps["ask"]
            # Another image: the first one is in a cache.
            steps["ask"] = host, script.replace("draw(20)", "draw(21)")
            left = _finish(machine, "ask", steps, folder)
            if "encode-0@" in left or '"source":"local"' not in left.replace('": ', '":'):
                sys.exit(f"without encoders the first host responded:\n{left}")
            print("the first host serves alone", flush=True)
            for host in FRONTS:
                _stop(f"front {host}", running[f"front {host}"], folder)
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"{log.name}:\n{log.read_text('utf-8', 'replace')[-4000:]}", flush=True)
        raise
    finally:
        for process in running.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
        shutil.rmtree(folder, ignore_errors=True)


def _stop(name: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    process.send_signal(signal.SIGINT)
    status = process.wait(STOP_S)
    print(f"{name}: ended with {status}", flush=True)
    if status:
        sys.exit((folder / f"{name}.log").read_text("utf-8", "replace")[-4000:])


def _faults(machine: Machine, folder: Path, shared: str, source: str) -> None:
    """Break processes and the network under load; exit where a response is wrong.

    Args:
        shared: Engine of the first host that both fronts share.
        source: Of items whose way is by the shared engines.
    """
    cut = SHARED[0 if source == "prefix_cache" else 1]
    log, stop = folder / "load.log", folder / "stop"
    script = f"exec python -m ci.hosts load {GATEWAY} {stop}"
    loading = machine.start(FRONTS[0], script, log)
    try:
        _wait_items(log, source)
        for host, name in ((SHARED[0], shared), (FRONTS[1], "front")):
            for fault in ("kill", "stop"):
                time.sleep(LOAD_S)
                pid = pid_of(machine, host, name)
                print(f"faults: {fault} {name} of {host}", flush=True)
                if fault == "kill":
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.killpg(pid, signal.SIGSTOP)
                    time.sleep(STOPPED_S)
                    os.killpg(pid, signal.SIGCONT)
                _wait_items(log, source)
        print(f"faults: cut off {cut} for {CUT_S:g} s", flush=True)
        with machine.cut_off(cut):
            time.sleep(CUT_S)
        _wait_items(log, source)
    finally:
        stop.touch()
        loading.wait(ASK_S)
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    print(f"faults: {Counter(each['what'] for each in lines)}", flush=True)
    print(f"faults: {Counter(each['by'] for each in lines)}", flush=True)
    slowest = max(each["s"] for each in lines)
    print(f"faults: {len(lines)} requests, slowest {slowest:.1f} s", flush=True)
    wrong = [each for each in lines if each["wrong"]]
    print(f"faults: {len(wrong)} of {len(lines)} differ from what the image shows", flush=True)
    # The model is right about at least 95 % of images that it has not seen.
    if len(wrong) > 0.05 * len(lines):
        sys.exit(f"faults: {wrong[:5]}")


def pid_of(machine: Machine, host: str, name: str) -> int:
    """Return the process of that name, when it is up."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        shown = subprocess.run(
            [ROOT / ".venv/bin/epd-launch", "status", "--json"],
            env=machine.environment(host),
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


def _wait_items(log: Path, source: str) -> None:
    """Return when new requests get their items, or the KV of these, from other hosts again."""
    begin, end = log.stat().st_size, time.monotonic() + START_S
    while time.monotonic() < end:
        text = log.read_bytes()[begin:].decode()
        if text.count(f'"what": "{source}"') >= 5:
            return
        time.sleep(0.5)
    sys.exit(f"faults: no {source} for {START_S:g} s")


def _load(gateway: str, stop: Path) -> None:
    """Send requests for images with known contents until a file is there; print each end."""
    from epd_portable.demo.pictures import QUESTIONS, QuestionKind, draw

    lock, seeds = threading.Lock(), iter(range(1000, 10**9))

    def ask(seed: int) -> tuple[str, str, str]:
        image, kind = draw(seed), QuestionKind.DESCRIBE
        content = [
            {"type": "image_url", "image_url": {"url": image.data_url()}},
            {"type": "text", "text": QUESTIONS[kind]},
        ]
        body: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 24}
        body["messages"] = [{"role": "user", "content": content}]
        connection = http.client.HTTPConnection(gateway.partition("://")[2], timeout=ASK_S)
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
            return "no connection", "", "" if isinstance(error, ConnectionError) else repr(error)
        except TimeoutError:
            return "no response", "", f"none in {ASK_S:g} s"
        finally:
            connection.close()
        if response.status != 200:
            named = response.status in (429, 503) and found.get("error", {}).get("message")
            return f"status {response.status}", "", "" if named else str(found)
        said = found["choices"][0]["message"]["content"]
        item = ((found.get("ec_transfer_params") or {}).get("items") or [{}])[0]
        right = said == image.scene.answer(kind)
        by = item.get("encoder", "")
        return item.get("source", "?"), by, "" if right else f"{said!r} of {seed}"

    def run() -> None:
        while not stop.exists():
            begun = time.monotonic()
            with lock:
                seed = next(seeds)
            what, by, wrong = ask(seed)
            taken = round(time.monotonic() - begun, 2)
            with lock:
                line = {"what": what, "by": by, "wrong": wrong, "s": taken}
                print(json.dumps(line), flush=True)
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
        main(prefills=sys.argv[1:2] == ["prefill"])
