"""Sends a mixed load to real engines on the CPU, and fails where a process grows.

    python -m ci.soak [SECONDS]    an hour by default, of which the first third is for warming up

A front with HTTPS, API keys and a store, two encode engines and one that generates. Four clients
send new and repeated images, videos, texts and streams, and abort a part of them. Every minute the
first encode engine is killed. Every five seconds the processes that live on are sampled: private
memory, threads, sockets, other open files, files and bytes in ``/dev/shm``, and temporary files.

Growth is what rises in each quarter of the samples after warming up: the least of the rises between
the medians of neighbouring quarters counts. A single step is no growth, nor is a peak.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import ssl
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from epd_portable.demo import servers
from epd_portable.demo.pictures import QUESTIONS, QuestionKind, draw
from epd_portable.envs import EPD_INSTANCE, EPD_RUN_ID
from tests.certificates import make_certificate
from tests.e2e.asking import AUTHORIZED, KEY
from tests.e2e.engines import process
from tests.e2e.modalities.parts import frames
from tests.faults.census import SHM, descriptors_of
from tests.kit.load import Load

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 3600.0
WARM = 1 / 3
"""Part of the time in which caches and pools fill."""
PARTS = 4
SAMPLE_S = 5.0
KILL_S = 60.0
"""From an encode engine's return to its next death."""
VICTIM = "encode-0"
CLIENTS = 4
ANSWER_S = 120.0
REPEATED = 16
MOST_WRONG = 0.05
"""Part of images that the demo's model may describe wrongly."""
MEMORY = "private MiB"
SETTINGS = (
    "instances.encode.count=2",
    "engine_args.limit_mm_per_prompt={video: 2}",
    "engine_args.skip_mm_profiling=true",
    # Caches that are full after minutes, not after hours.
    "engine_args.mm_processor_cache_gb=0.02",
    "instances.encode.host_cache_bytes=2MiB",
    "transfer.pool_bytes=8MiB",
    "store.kind=file",
    "store.max_bytes=8MiB",
    "store.timeout_ms=10000",
)

Series = Mapping[tuple[str, str], Sequence[float]]
"""Samples in order of time, by process and quantity."""


def rise(samples: Sequence[float]) -> float:
    """Return the least rise between the medians of neighbouring quarters; negative if one falls.

    Raises:
        ValueError: There are fewer samples than quarters.
    """
    if len(samples) < PARTS:
        raise ValueError(f"{len(samples)} samples: at least {PARTS} are needed")
    edges = [len(samples) * part // PARTS for part in range(PARTS + 1)]
    medians = [statistics.median(samples[begin:end]) for begin, end in itertools.pairwise(edges)]
    return min(after - before for before, after in itertools.pairwise(medians))


def allowed(quantity: str, level: float) -> float:
    """Return the rise within a quarter that is no growth yet: of memory 1 MiB or 0.5 %."""
    return max(1.0, 0.005 * level) if quantity == MEMORY else 0.5


def growth(series: Series) -> list[str]:
    """Return a line for each quantity of a process that grows."""
    found = []
    for (name, quantity), samples in series.items():
        least, level = rise(samples), statistics.median(samples)
        if least > allowed(quantity, level):
            found.append(f"{name}: {quantity} rises by {least:.1f} or more in each quarter")
    return found


def sample(launcher: int) -> dict[tuple[str, str], float]:
    """Return what the processes of a topology have, but for the instance that is killed."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    run_ids = set()
    first = psutil.Process(launcher)
    for each in (first, *first.children(recursive=True)):
        try:
            environment = each.environ()
            instance = environment.get(EPD_INSTANCE.name, "launcher")
            name = f"{instance} {each.name()}"
            status = Path(f"/proc/{each.pid}/status").read_text("utf-8")
        except (psutil.Error, FileNotFoundError, ProcessLookupError):  # It has just ended.
            continue
        run_ids |= {environment[key] for key in {EPD_RUN_ID.name} & environment.keys()}
        if instance == VICTIM or "RssAnon:" not in status:
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines())
        files = descriptors_of(each.pid)
        sockets = files.pop("socket", 0)
        found[name, MEMORY] += int(fields["RssAnon"].split()[0]) / 1024
        found[name, "processes"] += 1
        found[name, "threads"] += int(fields["Threads"])
        found[name, "sockets"] += sockets
        found[name, "other files"] += files.total()
    for run_id in run_ids:
        folder = Path(tempfile.gettempdir()) / f"epd-{run_id}"
        # vLLM leaves a rendezvous file of 2 KiB for each killed engine until the run ends.
        names = [path.name for path in folder.rglob("*") if not path.match("vllm_dist_*")]
        found["temporary folder", "files"] += len(names)
    for path in (path for run_id in run_ids for path in SHM.glob(f"epd-{run_id}-*")):
        with contextlib.suppress(FileNotFoundError):  # Its process has just ended.
            found[str(SHM), "MiB"] += path.stat().st_blocks / 2048
            found[str(SHM), "files"] += 1
    return found


class Clients:
    """Requests of all kinds to a front, whose responses are checked.

    Args:
        connect: Returns a client of the front.

    Attributes:
        kinds: Methods that send a request and return its problem, in the order of numbers.
        counts: Requests by kind.
        wrong: Images that were described wrongly.
        failed: Requests that got an error, or none of what they should.
    """

    def __init__(self, connect: Callable[[], httpx.Client]) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong = 0
        self.failed: list[str] = []
        self.kinds = {
            "image": self._image,
            "repeated image": self._repeated,
            "video": self._video,
            "text": self._text,
            "stream": self._stream,
            "aborted stream": self._aborted_stream,
            "aborted request": self._aborted_request,
            "new connection": self._new_connection,
            "metrics": self._metrics,
        }
        self._connect = connect
        self.client = connect()

    def send(self, number: int) -> None:
        """Send the request with this number, and note how it ended."""
        kind = [*self.kinds][number % len(self.kinds)]
        try:
            problem = self.kinds[kind](number)
        except httpx.HTTPError as error:
            problem = repr(error)
        self.counts[kind] += 1
        if problem:
            self.failed.append(f"{kind} {number}: {problem}")

    def _image(self, number: int) -> str:
        return self._describe(self.client, 10_000 + number)

    def _repeated(self, number: int) -> str:
        return self._describe(self.client, number % REPEATED)

    def _new_connection(self, number: int) -> str:
        with self._connect() as client:
            return self._describe(client, number % REPEATED)

    def _describe(self, client: httpx.Client, seed: int) -> str:
        shown, kind = draw(seed), QuestionKind.DESCRIBE
        response = client.post("/v1/chat/completions", json=asked(image(seed)))
        if problem := _problem(response):
            return problem
        self.counts["described"] += 1
        found = response.json()["choices"][0]["message"]["content"]
        self.wrong += found != shown.scene.answer(kind)
        return ""

    def _video(self, number: int) -> str:
        return self._status(asked(frames(number, 4)))

    def _text(self, number: int) -> str:
        return self._status(asked(f"Number {number}."))

    def _metrics(self, number: int) -> str:
        response = self.client.get("/metrics")
        return _problem(response)

    def _status(self, body: dict[str, Any]) -> str:
        response = self.client.post("/v1/chat/completions", json=body)
        return _problem(response)

    @contextlib.contextmanager
    def _streaming(self, number: int, **extra: Any) -> Iterator[httpx.Response]:
        body = asked(image(20_000 + number), stream=True, **extra)
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            yield response

    def _stream(self, number: int) -> str:
        with self._streaming(number) as response:
            if problem := _problem(response):
                return problem
            lines = [line for line in response.iter_lines() if line]
        return "" if lines[-1:] == ["data: [DONE]"] else f"ended with {lines[-1:]}"

    def _aborted_stream(self, number: int) -> str:
        with self._streaming(number, max_tokens=500, ignore_eos=True) as response:
            if problem := _problem(response):
                return problem
            first = next(response.iter_lines(), "")
            return "" if first.startswith("data: {") else f"began with {first!r}"

    def _aborted_request(self, number: int) -> str:
        patience_s = random.Random(number).uniform(0.01, 0.5)
        body = asked(image(30_000 + number), max_tokens=500, ignore_eos=True)
        try:
            response = self.client.post("/v1/chat/completions", json=body, timeout=patience_s)
        except httpx.TimeoutException:
            self.counts["aborted"] += 1
            return ""
        # On a loaded machine a client may run again when its response is there.
        return _problem(response)


def _problem(response: httpx.Response) -> str:
    """Return what is wrong with a response, if its status is not 200."""
    well = response.status_code == httpx.codes.OK
    return "" if well else f"status {response.status_code}: {response.read().decode()}"


def image(seed: int) -> dict[str, Any]:
    """Return an image of the demo as a part of a message."""
    return {"type": "image_url", "image_url": {"url": draw(seed).data_url()}}


def asked(part: dict[str, Any] | str, **extra: Any) -> dict[str, Any]:
    """Return a request for the description of a part, or for a response to a text."""
    question = {"type": "text", "text": QUESTIONS[QuestionKind.DESCRIBE]}
    content = part if isinstance(part, str) else [part, question]
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "temperature": 0, "max_tokens": 24, "messages": messages, **extra}


@dataclass
class Victim:
    """The encode engine that is killed now and then."""

    launcher: int
    client: httpx.Client
    deaths: int = 0
    next_s: float = 0.0

    def kill_now_and_then(self) -> None:
        """Kill it when it has been up for long enough."""
        health = self.client.get(f"/epd/instances/{VICTIM}/health")
        if health.status_code != httpx.codes.OK:
            self.next_s = time.monotonic() + KILL_S
        elif time.monotonic() > self.next_s:
            # The encoder cache may fill hundreds of MiB: what it holds is no leak.
            self.client.post("/reset_encoder_cache").raise_for_status()
            os.killpg(process(self.launcher, VICTIM).pid, signal.SIGKILL)
            self.deaths += 1
            self.next_s = time.monotonic() + KILL_S


def run(seconds: float, folder: Path) -> int:
    """Run the load; returns the exit status."""
    cert, key = make_certificate(folder)
    settings = [
        *SETTINGS,
        f"front.tls_cert_file={cert}",
        f"front.tls_key_file={key}",
        f"front.api_keys_file={folder / 'keys'}",
        f"store.path={folder / 'store'}",
    ]
    (folder / "keys").write_text(KEY)
    (folder / "keys").chmod(0o600)
    server = servers.topology(
        ROOT / "configs/1e1pd.yaml",
        platform="cpu",
        log_dir=folder / "logs",
        settings=settings,
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    samples: list[dict[tuple[str, str], float]] = []
    with server:
        url = server.url.replace("http://", "https://")
        clients = Clients(
            partial(
                httpx.Client,
                base_url=url,
                headers=AUTHORIZED,
                verify=ssl.create_default_context(cafile=cert),
                trust_env=False,
                timeout=ANSWER_S,
            )
        )
        victim = Victim(server.pid, clients.client, next_s=time.monotonic() + KILL_S)
        begin_s = time.monotonic()
        with Load(clients.send, clients=CLIENTS, pause_s=0.05) as load:
            while (passed_s := time.monotonic() - begin_s) < seconds:
                time.sleep(SAMPLE_S)
                load.wait_for(1)
                victim.kill_now_and_then()
                if passed_s >= WARM * seconds:
                    samples.append(sample(server.pid))
    names = {name for each in samples for name in each}
    series = {name: [each.get(name, 0.0) for each in samples] for name in names}
    return report(series, clients, victim.deaths)


def report(series: Series, clients: Clients, deaths: int) -> int:
    """Print figures and problems; returns the exit status."""
    for (name, quantity), values in sorted(series.items()):
        quarter = len(values) // PARTS
        begin, end = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        most = max(values)
        print(f"{name:<36} {quantity:<12} {begin:9.1f} -> {end:9.1f}, at most {most:9.1f}")
    print(f"requests: {json.dumps(clients.counts)}")
    print(f"{VICTIM} killed {deaths} times, {clients.wrong} images described wrongly")
    problems = [*growth(series), *clients.failed[:20]]
    if clients.wrong > MOST_WRONG * clients.counts["described"]:
        problems.append("too many images are described wrongly")
    if not clients.counts["aborted"]:
        problems.append("no request was aborted")
    if not deaths:
        problems.append(f"{VICTIM} was never killed")
    for each in problems:
        print(f"soak: {each}", file=sys.stderr)
    return 1 if problems else 0


def main() -> int:
    """Run the load for the given time; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seconds", nargs="?", type=float, default=SECONDS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="epd-soak-") as folder:
        return run(arguments.seconds, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
