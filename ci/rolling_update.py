"""Updates a deployment from one release of vLLM to another, part by part, under load.

    python -m ci.rolling_update .venv-engines

The new release is that of this process, the old one that of the environment. A gateway forwards to
two fronts with a prefill+decode engine each, and two encode engines are shared by both fronts. One
front is replaced first, then both encode engines, then the other front: each is drained and
stopped, and its successor of the new release starts and joins. Requests come at a fixed rate,
whether earlier ones have ended or not. None may fail. Every response must be that of plain vLLM of
one of the releases: its tokens, and log-probabilities within 1e-3, in float32. Encode and
prefill+decode engines of each two releases must have exchanged images, and after the update only
new encode engines encode.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from ci.mixed_engines import Content, Environment, build, environments, launcher, reference
from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.demo import servers
from epd_portable.errors import LaunchError
from epd_portable.launch.run.fronts import FrontClient
from tests.e2e.asking import Answer, ask, ask_streamed, assert_equal, picture, text
from tests.e2e.engines import RESTART_S, wait_until

INTERVAL_S = 0.8
"""Seconds between the starts of two requests."""
MOST_OPEN = 100
"""Open requests at once: more than come in the time that any of them takes."""
SETTLED = 10
"""Requests that begin and end between two replacements."""
FIRST_DIRECT = 100_000
"""Seed of the first image that is sent to a front directly."""
MOST_DIRECT = 40
"""Images until each encode engine has got one of them."""
AT_ONCE = 8
"""Images at once: one by one, all may go to the engine that encoded a little faster."""
PARTS = 3
"""Engines of a front: one that generates, two that encode."""
SETTINGS = (
    "engine_args.num_gpu_blocks_override=320",
    "transfer.wait_timeout_s=120",
    "front.item_outcomes=true",
    "front.elastic_encode=false",
)


def content_of(number: int) -> Content:
    """Return the content of a request: a text, one image or two."""
    if number % 4 == 0:
        return f"Number {number}."
    if number % 4 == 1:
        return [picture(2 * number), text("and"), picture(2 * number + 1, 224), text("Describe.")]
    return [picture(2 * number), text("What is in the image?")]


def send(url: str, number: int) -> Answer:
    """Send a request; some responses are streamed."""
    return (ask_streamed if number % 4 == 3 else ask)(url, content_of(number))


@dataclass
class OpenLoad:
    """Requests at a fixed rate until the end of a ``with`` block, which waits for open ones.

    Attributes:
        sent: Responses by number of request, with the seconds that each took.
        failed: A line for each request that failed.
    """

    url: str
    sent: dict[int, tuple[Answer, float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._end = threading.Event()
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(MOST_OPEN)
        self._arrivals = threading.Thread(target=self._run)

    def _run(self) -> None:
        begun_s = time.monotonic()
        for number in self._numbers:
            due_s = begun_s + number * INTERVAL_S
            if self._end.wait(max(0.0, due_s - time.monotonic())):
                return
            self._pool.submit(self._send, number, due_s)

    def _send(self, number: int, due_s: float) -> None:
        try:
            answer = send(self.url, number)
        except (httpx.HTTPError, AssertionError, LookupError, ValueError) as error:
            self.failed.append(f"request {number}: {error!r}")
        else:
            self.sent[number] = answer, time.monotonic() - due_s

    def settle(self) -> None:
        """Wait until further requests have ended."""
        wanted = len(self.sent) + len(self.failed) + SETTLED
        wait_until(
            lambda: len(self.sent) + len(self.failed) >= wanted,
            "requests end",
            within_s=RESTART_S,
        )

    def __enter__(self) -> OpenLoad:
        self._arrivals.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._arrivals.join()
        self._pool.shutdown()


class Deployment:
    """Two fronts behind a gateway and two encode engines, each part of one of two releases.

    Args:
        stack: Stops what is started.
        folder: For logs and the secret.

    Attributes:
        direct: Requests that were sent to a front itself, by number.
        pairs: Releases of an encode engine and of the front that got an image from it.
    """

    def __init__(self, old: Environment, model: Path, folder: Path, stack: ExitStack) -> None:
        self._model, self._folder, self._stack = model, folder, stack
        self._secret_file = folder / "secret"
        make_secret_file(str(self._secret_file))
        self.fronts = [self._front(old, name) for name in ("front-a", "front-b")]
        self.encoders = [self._encoder(old, name) for name in ("a", "b")]
        self.direct: dict[int, Answer] = {}
        self.pairs: set[tuple[str, str]] = set()
        self._numbers = itertools.count(FIRST_DIRECT + 2, 4)

    def _front(self, environment: Environment, name: str) -> servers.Server:
        return self._launcher(environment, name, "instances.encode.count=0")

    def _encoder(self, environment: Environment, name: str) -> servers.Server:
        named = f"{name}-{environment.release}"
        urls = ", ".join(each.url for each in self.fronts)
        return self._launcher(
            environment,
            named,
            "instances.prefill_decode.count=0",
            f"launch.name={named}",
            f"launch.join=[{urls}]",
        )

    def _launcher(self, environment: Environment, name: str, *settings: str) -> servers.Server:
        folder, more = self._folder / name, (*SETTINGS, *settings)
        return launcher(environment, self._model, folder, self._secret_file, *more)

    def start(self) -> None:
        """Start fronts and encode engines, and wait until all of them are up."""
        for parts in (self.fronts, self.encoders):
            for each in parts:
                each.start()
                self._stack.callback(each.stop)
            for each in parts:
                each.wait_until_ready()
        self.wait_until_up()

    def wait_until_up(self) -> None:
        """Wait until both fronts have both encode engines.

        Raises:
            SystemExit: A front refuses an engine, or does not have it in time.
        """
        for front in self.fronts:
            wait_until(
                partial(self._is_whole, front.url), "a front has its engines", within_s=RESTART_S
            )

    def _is_whole(self, url: str) -> bool:
        try:
            found = asyncio.run(FrontClient(url, Secret.read(str(self._secret_file))).instances())
        except LaunchError:
            return False
        for each in found:
            if each["problem"]:
                raise SystemExit(f"{url}: {each['name']}: {each['problem']}")
        return len(found) == PARTS and all(each["state"] == "up" for each in found)

    def replace_front(self, index: int, new: Environment) -> None:
        """Stop a front and start one of another release with its address."""
        front = self.fronts[index]
        stop(front)
        front.popen = new.popen
        front.start()
        front.wait_until_ready()
        self.wait_until_up()

    def replace_encoder(self, index: int, new: Environment) -> None:
        """Stop an encode engine and let one of another release join."""
        stop(self.encoders[index])
        self.encoders[index] = self._encoder(new, "ab"[index])
        self.encoders[index].start()
        self._stack.callback(self.encoders[index].stop)
        self.encoders[index].wait_until_ready()
        self.wait_until_up()

    def exchange(self) -> None:
        """Send images to each front until it has had one of each encode engine.

        Raises:
            SystemExit: An encode engine gets none.
        """
        for front in self.fronts:
            version = httpx.get(f"{front.url}/version", trust_env=False, timeout=60).json()
            wanted = {f"encode-0@{each.log.parent.name}" for each in self.encoders}
            missing = set(wanted)
            for _ in range(MOST_DIRECT // AT_ONCE):
                numbers = [*itertools.islice(self._numbers, AT_ONCE)]
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    answers = pool.map(partial(send, front.url), numbers)
                self.direct.update(zip(numbers, answers, strict=True))
                for number in numbers:
                    missing -= {each.get("encoder", "") for each in self.direct[number].items}
                if not missing:
                    break
            else:
                raise SystemExit(f"{front.url}: no image by {', '.join(sorted(missing))}")
            self.pairs |= {(each.rpartition("-")[2], version["version"]) for each in wanted}


def stop(server: servers.Server) -> None:
    """Drain and stop a part.

    Raises:
        SystemExit: It does not end by itself.
    """
    status = server.stop()
    if status:
        raise SystemExit(f"{server.log}: ended with {status} when it was stopped")


def gateway(fronts: Sequence[servers.Server], folder: Path) -> servers.Server:
    """Return a gateway to fronts."""
    port = servers.free_port()
    argv = [sys.executable, "-m", "epd_portable.launch.cli", "gateway", "--port", str(port)]
    for each in fronts:
        argv += ["--front", each.url]
    log = folder / "gateway.log"
    return servers.Server(name="gateway", argv=argv, url=f"http://127.0.0.1:{port}", log=log)


def update(
    old: Environment, new: Environment, model: Path, folder: Path
) -> tuple[Deployment, OpenLoad]:
    """Replace every part under load, and return what was sent."""
    with ExitStack() as stack:
        deployment = Deployment(old, model, folder, stack)
        deployment.start()
        entry = stack.enter_context(gateway(deployment.fronts, folder))
        with OpenLoad(entry.url) as load:
            load.settle()
            for part in ("front 0", "encoder 0", "encoder 1", "front 1"):
                kind, _, index = part.partition(" ")
                replace = (
                    deployment.replace_front if kind == "front" else deployment.replace_encoder
                )
                before, begun_s = len(load.sent), time.monotonic()
                replace(int(index), new)
                took_s = time.monotonic() - begun_s
                print(
                    f"{part}: of {new.release} after {took_s:.0f} s, "
                    f"{len(load.sent) - before} responses meanwhile, {len(load.failed)} failures",
                    flush=True,
                )
                load.settle()
                deployment.exchange()
        return deployment, load


def problems(
    found: Mapping[int, Answer], plain: Mapping[str, Mapping[int, Answer]]
) -> Iterator[str]:
    """Yield a line for each response that is not that of plain vLLM.

    Args:
        plain: Responses of plain vLLM by its release.
    """
    for number, answer in sorted(found.items()):
        by = {each["encoder"].rpartition("-")[2] for each in answer.items if each.get("encoder")}
        errors = []
        for release in by if len(by) == 1 else plain:
            try:
                assert_equal(answer, plain[release][number])
            except AssertionError as error:
                errors.append(f"{release}: {error}")
            else:
                break
        else:
            yield f"request {number} differs from plain vLLM {'; '.join(errors)}"


def main() -> None:
    """Run the update; exit status 1 when a request fails or a response differs."""
    new, old = environments()
    with tempfile.TemporaryDirectory(prefix="epd-rolling-") as name:
        folder = Path(name)
        model = build(folder)
        deployment, load = update(old, new, model, folder)
        found = {number: answer for number, (answer, _) in load.sent.items()} | deployment.direct
        contents = {number: content_of(number) for number in sorted(found)}
        plain = {
            each.release: dict(
                zip(
                    contents,
                    reference(each, model, folder / each.release, list(contents.values())),
                    strict=True,
                )
            )
            for each in (old, new)
        }
    sources = Counter(each["source"] for answer in found.values() for each in answer.items)
    slowest_s = max(took_s for _, took_s in load.sent.values())
    print(f"{len(load.sent)} requests by the gateway, {len(load.failed)} failed", flush=True)
    print(f"slowest {slowest_s:.1f} s, sources of images: {dict(sources)}", flush=True)
    print(f"encode and generate: {sorted(deployment.pairs)}", flush=True)
    wrong = [*load.failed, *problems(found, plain)]
    missing = set(itertools.product(plain, plain)) - deployment.pairs
    wrong += [f"no image from {encode} to {decode}" for encode, decode in sorted(missing)]
    if wrong:
        raise SystemExit("\n".join(wrong[:20]))


if __name__ == "__main__":
    main()
