"""``epd-bench store``: how soon an encoder output is there when a store brings it.

Two measurements. One without engines: entries of several sizes are written, and brought into slots
by the loader of a real `Receiver`, beside a plain copy and ``redis-benchmark`` at the same size.
One with real engines: a topology encodes pictures, is started anew, and gets them from the store;
the time of a load is compared with that of the encoding of the same picture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from epd_portable.bench import pictures, servers
from epd_portable.bench.commands import DTYPE, WIDTH
from epd_portable.bench.report import Report, Table, conditions
from epd_portable.bench.scratch import scratch_folder
from epd_portable.bench.stand_in import StandInRequest
from epd_portable.bench.stats import quantile
from epd_portable.bench.traces import named, read_events, time_of
from epd_portable.config.instance import InstanceConfig
from epd_portable.config.secret import Secret
from epd_portable.config.store import StoreSection
from epd_portable.connector.stores.base import Entry, Store, make_store
from epd_portable.connector.stores.entry import Seal
from epd_portable.errors import MeasurementError
from epd_portable.runners.receiver import Receiver
from epd_portable.wire.descriptors import DTYPE_BYTES, TensorSpec
from epd_portable.wire.params import ExpectedTransfer, PrefillParams

SERVER, PEER = "redis-server", "redis-benchmark"
_START_S = 10.0
_ANSWER_S = 300.0
_STORED_S = 60.0
_WARM_UP = 3
TURNS = 5
"""All that is compared takes so many turns."""
_TIMEOUT_MS = 60_000.0
_MEASURED = tuple(
    f"epd_portable.connector.stores.{name}" for name in ("entry", "file", "loader", "redis", "resp")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSample:
    """One item, written and brought back.

    Attributes:
        kind: Of the store.
        nbytes: Of the item.
        save_s: Sealing and writing, in seconds.
        ask_s: The router's question for it.
        ready_s: From a request's arrival at the PD instance until the item is in its slot, checked.
        memcpy_s: A plain copy of as many bytes, right after.
        set_s: What ``redis-benchmark`` took to set as much, in the same turn; 0 if it did not run.
        get_s: The same to get it.
    """

    kind: str
    nbytes: int
    save_s: float
    ask_s: float
    ready_s: float
    memcpy_s: float
    set_s: float = 0.0
    get_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSample:
    """One picture of a real topology.

    Attributes:
        pixels: Its side.
        nbytes: Of its encoder output.
        encode_s: From the beginning to the end of its encoding.
        ready_s: Later, from its request's arrival until it was in its slot from the store.
    """

    pixels: int
    nbytes: int
    encode_s: float
    ready_s: float


# -- without engines -------------------------------------------------------------------------------


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Run a redis-server that keeps everything in memory; yield its port.

    Raises:
        MeasurementError: It is not installed, or does not start.
    """
    if shutil.which(SERVER) is None:
        raise MeasurementError(f"{SERVER} is not on PATH: install it, or measure --kind file only")
    port = servers.free_port()
    argv = [SERVER, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        store = make_store(StoreSection(kind="redis", url=f"redis://127.0.0.1:{port}"))
        end_s = time.monotonic() + _START_S
        while True:
            try:
                store.check()
                break
            except Exception as error:
                if time.monotonic() > end_s or process.poll() is not None:
                    raise MeasurementError(f"{SERVER} does not answer: {error}") from error
                time.sleep(0.05)
        store.close()
        yield port
    finally:
        process.terminate()
        process.wait(_START_S)


def measure(
    kinds: Sequence[str],
    sizes: Sequence[int],
    *,
    repeat: int,
    peer: bool,
    report: Callable[[str], None],
) -> list[StoreSample]:
    """Measure at least so many items of every size in every kind of store, in turns.

    Args:
        kinds: Of stores.
        sizes: Of items, in bytes.
        repeat: Items of each.
        peer: Let ``redis-benchmark`` take its turns, too, at the same server.
        report: Gets a progress line a size.

    Raises:
        MeasurementError: A server cannot be started, or an item did not come from the store.
    """
    samples: list[StoreSample] = []
    a_turn = -(-repeat // TURNS)
    with scratch_folder() as (folder, secret_file), contextlib.ExitStack() as opened:
        port = opened.enter_context(redis_server(folder)) if "redis" in kinds else 0
        sections = {
            "redis": StoreSection(
                kind="redis", url=f"redis://127.0.0.1:{port}", timeout_ms=_TIMEOUT_MS
            ),
            "file": StoreSection(kind="file", path=str(folder / "files"), timeout_ms=_TIMEOUT_MS),
        }
        for nbytes in sizes:
            report(f"{nbytes} bytes: {TURNS} turns of {a_turn} items")
            with contextlib.ExitStack() as open_sides:
                sides = {
                    kind: open_sides.enter_context(_side(sections[kind], secret_file, nbytes))
                    for kind in kinds
                }
                for kind, side in sides.items():
                    for number in range(_WARM_UP):
                        side.sample(kind, f"warm-{number}")
                for turn in range(TURNS):
                    set_s, get_s = _peer(port, nbytes, a_turn) if port and peer else (0.0, 0.0)
                    for kind, side in sides.items():
                        for number in range(a_turn):
                            sample = side.sample(kind, f"{turn}-{number}")
                            if kind == "redis":
                                sample = dataclasses.replace(sample, set_s=set_s, get_s=get_s)
                            samples.append(sample)
    return samples


def _peer(port: int, nbytes: int, repeat: int) -> tuple[float, float]:
    """Return how long ``redis-benchmark`` takes on average to set and to get as much.

    Raises:
        MeasurementError: It is not installed, or says something else than expected.
    """
    if shutil.which(PEER) is None:
        raise MeasurementError(f"{PEER} is not on PATH: install it, or give --no-peer")
    argv = [PEER, "-p", str(port), "-t", "set,get", "-d", str(nbytes), "-c", "1"]
    argv += ["-n", str(repeat), "--csv"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    times = {}
    for line in said.splitlines():
        name, *figures = line.replace('"', "").split(",")
        if name in ("SET", "GET") and len(figures) > 1:
            times[name] = float(figures[1]) / 1000
    if len(times) != 2:
        raise MeasurementError(f"{PEER} said: {said[:300]}")
    return times["SET"], times["GET"]


@dataclass
class _Side:
    receiver: Receiver
    store: Store
    seal: Seal
    namespace: str
    tensor: TensorSpec
    payload: memoryview
    target: memoryview

    def sample(self, kind: str, name: str) -> StoreSample:
        key = self.seal.key(self.namespace, name, "image")
        begin_s = time.perf_counter()
        head = self.seal.head(
            self.payload,
            key=key,
            mm_hash=name,
            modality="image",
            metadata=None,
            tensor=self.tensor,
        )
        entry = Entry(
            key=key,
            head=head,
            payload=self.payload,
            mm_hash=name,
            dtype=self.tensor.dtype,
            shape=self.tensor.shape,
        )
        self.store.save_caches([entry])
        saved_s = time.perf_counter()
        self.store.has_caches([key])
        asked_s = time.perf_counter()
        ready_s = self._load(name, key)
        copy_s = time.perf_counter()
        self.target[:] = self.payload
        return StoreSample(
            kind=kind,
            nbytes=len(self.payload),
            save_s=saved_s - begin_s,
            ask_s=asked_s - saved_s,
            ready_s=ready_s,
            memcpy_s=time.perf_counter() - copy_s,
        )

    def _load(self, name: str, key: str) -> float:
        """Return how long an item takes until the engine's next step would place it."""
        receiver = self.receiver
        request = StandInRequest.of(name, [name], self.tensor)
        expected = ExpectedTransfer(transfer_id=name, mm_hash=name, store=key)
        begin_s = time.perf_counter()
        with receiver.lock:
            receiver.before_step()
            receiver.request_arrived(
                request, request.prompt(), PrefillParams(transfers=(expected,))
            )
        placed = False
        while not placed:
            if time.perf_counter() - begin_s > _TIMEOUT_MS / 1000:
                raise MeasurementError(f"{name} did not come from the store; its log says why")
            receiver.rest(0.1)
            with receiver.lock:
                receiver.before_step()
                orders = receiver.take_orders(receiver.cache.get_freed_mm_hashes(), computes=True)
                placed = bool(orders.placements)
                ready_s = time.perf_counter() - begin_s
                receiver.step_done()
        with receiver.lock:
            receiver.request_finished(name, request.num_tokens)
            receiver.cache.free(request)
            receiver.cache.reset()
            receiver.take_orders(receiver.cache.get_freed_mm_hashes(), computes=True)
            receiver.step_done()
        return ready_s


@contextlib.contextmanager
def _side(section: StoreSection, secret_file: str, nbytes: int) -> Iterator[_Side]:
    tokens = max(1, nbytes // (WIDTH * DTYPE_BYTES[DTYPE]))
    tensor = TensorSpec(shape=(tokens, WIDTH), dtype=DTYPE)
    seal = Seal(Secret.read(secret_file))
    namespace = seal.namespace("store")
    config = InstanceConfig(
        instance="store",
        platform="cpu",
        path="shm",
        wait_timeout_s=_TIMEOUT_MS / 1000,
        control_address=f"tcp://127.0.0.1:{servers.free_port()}",
        pool=f"epd-bench-{os.getpid()}-{section.kind}",
        pool_bytes=max(4 * tensor.nbytes, 1 << 20),
        secret_file=secret_file,
        store=section,
    )
    receiver = Receiver(
        config,
        fingerprint="store",
        cache_size=4 * tokens,
        namespace=namespace,
    )
    receiver.listen()
    store = make_store(section)
    try:
        payload = memoryview(os.urandom(tensor.nbytes))
        # Of pages that are there, as a slot's are: what is timed is the copy alone.
        target = memoryview(bytearray(payload))
        yield _Side(receiver, store, seal, namespace, tensor, payload, target)
    finally:
        store.close()
        receiver.close()


# -- with engines ----------------------------------------------------------------------------------


def measure_engines(
    config: Path,
    *,
    platform: str,
    model: str | None,
    sides: Sequence[int],
    repeat: int,
    kind: str,
    report: Callable[[str], None],
) -> list[EngineSample]:
    """Have pictures encoded by a topology, and brought from the store to one that was started anew.

    Args:
        config: The topology file.
        platform: What to start it on.
        model: Replaces the model of the file.
        sides: Of pictures, in pixels.
        repeat: Pictures of each.
        kind: Of the store.
        report: Gets progress lines.

    Raises:
        MeasurementError: A picture was not had as it should have been.
    """
    asked = [(1000 * side + number, side) for number in range(repeat) for side in sides]
    with scratch_folder() as (folder, secret_file), contextlib.ExitStack() as opened:
        settings = [f"secret_file={secret_file}", f"store.kind={kind}"]
        if kind == "redis":
            port = opened.enter_context(redis_server(folder))
            settings.append(f"store.url=redis://127.0.0.1:{port}")
        else:
            settings.append(f"store.path={folder / 'files'}")
        settings += ["router.elastic_encode=false", "router.item_outcomes=true"]
        names: dict[tuple[int, int], str] = {}
        encoded: dict[str, float] = {}
        loaded: dict[str, tuple[float, int]] = {}
        for life in ("encodes", "loads"):
            trace = folder / life
            server = servers.topology(
                config,
                platform=platform,
                log_dir=folder / f"{life}-logs",
                settings=settings,
                model=model,
                env={"EPD_TRACE_DIR": str(trace)},
                report=report,
            )
            with server:
                report(f"the topology {life} {len(asked)} pictures")
                served = servers.model_name(server.url)
                for seed, side in asked:
                    item = _ask(server.url, served, seed, side)
                    wanted = "transfer" if life == "encodes" else "store"
                    if item["source"] != wanted:
                        raise MeasurementError(f"a picture came by {item['source']}: {item}")
                    names[seed, side] = str(item["mm_hash"])
                if life == "encodes":
                    _until_stored(trace, set(names.values()))
            events = read_events(trace)
            if life == "encodes":
                begun = {
                    str(each["items"][0]): time_of(each)  # type: ignore[index]
                    for each in named(events, "encode.begin")
                }
                for each in named(events, "encode.end"):
                    item_name = str(each["items"][0])  # type: ignore[index]
                    encoded[item_name] = time_of(each) - begun[item_name]
            else:
                arrived = {
                    str(name): time_of(each)
                    for each in named(events, "request.arrived")
                    for name in each["awaited"]  # type: ignore[union-attr]
                }
                for each in named(events, "item.landed"):
                    name = str(each["mm_hash"])
                    nbytes = each["nbytes"]
                    assert isinstance(nbytes, int)
                    loaded[name] = (time_of(each) - arrived[name], nbytes)
    return [
        EngineSample(
            pixels=side,
            nbytes=loaded[name][1],
            encode_s=encoded[name],
            ready_s=loaded[name][0],
        )
        for (_, side), name in names.items()
    ]


def _ask(url: str, model: str, seed: int, side: int) -> dict[str, object]:
    content = [
        {"type": "image_url", "image_url": {"url": pictures.data_url(seed, side)}},
        {"type": "text", "text": "?"},
    ]
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_ANSWER_S, trust_env=False)
    if answer.status_code != httpx.codes.OK:
        raise MeasurementError(f"answered {answer.status_code}: {answer.text[:300]}")
    found: dict[str, object] = answer.json()["ec_transfer_params"]["items"][0]
    return found


def _until_stored(trace: Path, names: set[str]) -> None:
    end_s = time.monotonic() + _STORED_S
    while not names <= {
        str(each["mm_hash"]) for each in named(read_events(trace), "store.written")
    }:
        if time.monotonic() > end_s:
            raise MeasurementError(f"not all pictures were stored within {_STORED_S:g} s")
        time.sleep(0.1)


# -- the page --------------------------------------------------------------------------------------


def make_report(
    samples: Sequence[StoreSample],
    engines: Sequence[EngineSample],
    *,
    command: str,
    load_before: float,
) -> Report:
    """Return the page of a measurement."""
    summary: list[dict[str, float | str | int]] = []
    rows = []
    for kind, nbytes in dict.fromkeys((each.kind, each.nbytes) for each in samples):
        group = [each for each in samples if (each.kind, each.nbytes) == (kind, nbytes)]
        median = {
            name: quantile([getattr(each, name) for each in group], 0.5)
            for name in ("save_s", "ask_s", "ready_s", "memcpy_s")
        }
        of_peer = ("–", "–")
        row: dict[str, float | str | int] = {"kind": kind, "nbytes": nbytes, **median}
        if all(each.get_s for each in group):
            row["set_ratio"] = quantile([each.set_s / each.save_s for each in group], 0.5)
            row["get_ratio"] = quantile([each.get_s / each.ready_s for each in group], 0.5)
            of_peer = (f"{row['set_ratio']:.2f}", f"{row['get_ratio']:.2f}")
        summary.append(row)
        rows.append(
            (
                kind,
                f"{nbytes / (1 << 20):g}",
                *of_peer,
                *(f"{median[name] * 1e3:.2f}" for name in median),
            )
        )
    tables = []
    if rows:
        tables.append(
            Table(
                title="Medians in ms; ratios: redis-benchmark's time, same turn, by ours",
                columns=(
                    "store",
                    "MiB",
                    "written / SET",
                    "ready / GET",
                    "written",
                    "asked",
                    "ready",
                    "plain copy",
                ),
                rows=tuple(rows),
            )
        )
    engine_rows = []
    for pixels in dict.fromkeys(each.pixels for each in engines):
        one = [each for each in engines if each.pixels == pixels]
        encode_s = quantile([each.encode_s for each in one], 0.5)
        ready_s = quantile([each.ready_s for each in one], 0.5)
        ratio = quantile([each.ready_s / each.encode_s for each in one], 0.5)
        summary.append(
            {"pixels": pixels, "encode_s": encode_s, "loaded_s": ready_s, "ratio": ratio}
        )
        engine_rows.append(
            (
                f"{pixels} × {pixels}",
                f"{one[0].nbytes >> 10}",
                f"{ratio:.3f}",
                f"{ready_s * 1e3:.2f}",
                f"{encode_s * 1e3:.1f}",
            )
        )
    if engine_rows:
        tables.append(
            Table(
                title="Real engines: a picture from the store beside its encoding; medians in ms",
                columns=("picture", "KiB", "ratio", "ready from the store", "encoded"),
                rows=tuple(engine_rows),
            )
        )
    return Report(
        title="Encoder outputs from a store",
        command=command,
        conditions=conditions(load_before, measured=_MEASURED),
        notes=(
            "Written: sealed and in the store. Asked: the router's question. Ready: from a "
            "request's arrival at the PD instance until the item is in its slot, loaded and "
            "checked.",
            "The server, its client and the loader's threads share the cores of this machine.",
        ),
        tables=tuple(tables),
        summary=summary,  # type: ignore[arg-type]
        samples=[dataclasses.asdict(each) for each in (*samples, *engines)],
    )
