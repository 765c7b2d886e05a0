"""Ask a router for pictures that come again, with and without a call of a render server before.

python compare.py ROUTER PID RENDER PID JSON: base addresses of the router and the render server,
with the pids of `epd-launch` and of the render server, and where to write all figures.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import random
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image

from epd_benchmarks import report
from tests.measurements.recomputed import render_calls, render_calls_cpu

SIDES = ("without", "with")
ROUNDS, REQUESTS = 3, 48
AT_ONCE = (1, 8)
SIZES = (448, 896)
PICTURES = 8
CHAT = "/v1/chat/completions"
MEASURED = ("epd_portable.router.contents.body", "epd_portable.router.choice.scorers")


def picture(size: int, seed: int) -> str:
    """Return noise as the data URL of a JPEG."""
    noise = Image.frombytes("RGB", (size, size), random.Random(seed).randbytes(size * size * 3))
    file = io.BytesIO()
    noise.save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def body(url: str, words: str, side: str) -> dict[str, Any]:
    """Return a request; its salt keeps what one side has cached from the other."""
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": words},
    ]
    fixed = {"model": "demo", "max_tokens": 8, "ignore_eos": True, "stream": True}
    return {**fixed, "cache_salt": side, "messages": [{"role": "user", "content": content}]}


async def ask(client: httpx.AsyncClient, router: str, render: str | None, asked: Any) -> float:
    """Return the seconds until an answer's first token, the render call's among them."""
    begun = time.perf_counter()
    if render:
        rendered = await client.post(f"{render}{CHAT}/render", json=asked | {"mm_payload": "none"})
        rendered.raise_for_status()
    first = 0.0
    async with client.stream("POST", f"{router}{CHAT}", json=asked) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not first and '"content":"' in line and '"content":""' not in line:
                first = time.perf_counter() - begun
    return first


async def turn(
    router: str, render: str | None, requests: Sequence[Any], at_once: int
) -> list[float]:
    """Return the first tokens' times of requests, of which so many are open at any time."""
    room = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:

        async def one(asked: Any) -> float:
            async with room:
                return await ask(client, router, render, asked)

        return await asyncio.gather(*map(one, requests))


def cpu_s(parts: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Return the CPU time that processes have taken."""
    times = {name: [each.cpu_times() for each in found] for name, found in parts.items()}
    return {name: sum(each.user + each.system for each in of) for name, of in times.items()}


def main(router: str, launcher: str, render: str, server: str, file: str) -> None:
    """Measure, print the tables and write all figures."""
    family = psutil.Process(int(launcher)).children(recursive=True)
    routers = [each for each in family if "epd_portable.router" in each.cmdline()]
    parts = {"router": routers, "engines": [each for each in family if each not in routers]}
    parts["render"] = [psutil.Process(int(server))]
    parts["render"] += parts["render"][0].children(recursive=True)
    samples: list[Any] = []
    for size in SIZES:
        pictures = [picture(size, seed) for seed in range(PICTURES)]
        for number, at_once in itertools.product(range(ROUNDS + 1), AT_ONCE):
            for side in SIDES if number % 2 else reversed(SIDES):
                words = [f"{number} {at_once} {each} What is it?" for each in range(REQUESTS)]
                chosen = itertools.cycle(pictures)
                requests = [body(url, text, side) for url, text in zip(chosen, words, strict=False)]
                before, begun = cpu_s(parts), time.perf_counter()
                first = asyncio.run(
                    turn(router, render if side == "with" else None, requests, at_once)
                )
                wall_s, after = time.perf_counter() - begun, cpu_s(parts)
                if not number:  # Warms up.
                    continue
                sample = {"size": size, "at_once": at_once, "round": number, "side": side}
                used = {f"{name}_s": after[name] - before[name] for name in parts}
                samples.append({**sample, "wall_s": wall_s, **used, "ttft_s": first})
    document = {"samples": samples}
    made = report.Report(
        title="Pictures that come again, with and without a render call",
        conditions=report.conditions(MEASURED),
        tables={
            "With a render call by without it": [*render_calls(document)],
            "CPU time of a request, ms": [*render_calls_cpu(document)],
        },
        summary=None,
        samples=samples,
        command=shlex.join(["python", *sys.argv]),
    )
    print(report.to_markdown(made))
    report.write(made, Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
