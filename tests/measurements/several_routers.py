"""What several routers that share nothing cost: ``python -m tests.measurements.several_routers``.

Real router processes, one or two of them, stand before played instances; clients ask each in turn.
Played encoders compute one picture at a time and keep all of them, played prefill+decode instances
answer after a random time. Prints, for each number of routers, how uneven the loads of the
instances were, and how many encoders encoded a picture.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
from collections import Counter
from typing import Any

import httpx
from starlette.responses import Response

from epd_portable.router.warm_up import picture
from epd_portable.wire import codec
from epd_portable.wire.messages import LoadReport, LoadWanted
from tests.integration.router.stand_in import (
    Behaviour,
    ControlEnd,
    Received,
    StandIn,
    answer,
)
from tests.keyring import Signed, keys, secret_file

INSTANCES = 4
"""Encoders, and as many that answer."""
CLIENTS = 48
REQUESTS = 3000
PICTURES = 400
ENCODE_S = 0.02
ANSWER_S = 0.15
SAMPLE_S = 0.02
REPORT_S = 0.05
RUNNING = 4
"""Requests that a played engine computes for; others wait in its queue."""
CHOICES = {
    "default rules": None,
    "queue-scorer": {
        "plugins": [
            *({"type": kind} for kind in ("encode-filter", "decode-filter", "queue-scorer")),
            {"type": "consistent-hash-scorer"},
        ],
        "schedulingProfiles": [
            {
                "name": "encode",
                "plugins": [
                    {"pluginRef": "encode-filter"},
                    {"pluginRef": "consistent-hash-scorer"},
                ],
            },
            {
                "name": "decode",
                "plugins": [{"pluginRef": "decode-filter"}, {"pluginRef": "queue-scorer"}],
            },
        ],
    },
}


class Played:
    """The instances, and what is counted at them."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.in_flight: Counter[str] = Counter()
        self.encoded: Counter[tuple[str, str]] = Counter()
        self.encoders = [StandIn(f"e{n}", "encode") for n in range(INSTANCES)]
        self.pds = [StandIn(f"pd{n}", "prefill-decode") for n in range(INSTANCES)]
        self.controls = [ControlEnd(keys()) for _ in self.pds]
        for each in self.encoders:
            each.behaviour = self._encoding(each.name, asyncio.Lock())
        for each in self.pds:
            each.behaviour = self._answering(each.name)

    def _encoding(self, name: str, device: asyncio.Lock) -> Behaviour:
        async def behave(received: Received) -> Response:
            part = received.body["messages"][0]["content"][0]
            key = (name, str(part["uuid"]))
            async with device:
                if not self.encoded[key]:
                    await asyncio.sleep(ENCODE_S)
                self.encoded[key] += 1
            return await answer(received)

        return behave

    def _answering(self, name: str) -> Behaviour:
        async def behave(received: Received) -> Response:
            self.in_flight[name] += 1
            await asyncio.sleep(self._chance.expovariate(1 / ANSWER_S))
            self.in_flight[name] -= 1
            return await answer(received)

        return behave

    async def report(self) -> None:
        """Report loads to the routers that ask for them, until cancelled."""
        asking: dict[ControlEnd, set[str]] = {each: set() for each in self.controls}

        async def listen(control: ControlEnd) -> None:
            while True:
                identity, data = await control._socket.recv_multipart()
                if isinstance(codec.decode(data)[0], LoadWanted):
                    asking[control].add(identity.decode())

        listening = [asyncio.create_task(listen(each)) for each in self.controls]
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                for each, control in zip(self.pds, self.controls, strict=True):
                    count = self.in_flight[each.name]
                    running = min(count, RUNNING)
                    load = LoadReport(waiting=count - running, running=running)
                    for identity in asking[control]:
                        await control.send(identity, codec.encode(load, session="played"))
        finally:
            for task in listening:
                task.cancel()

    def settings(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        """Return what a router is told."""
        addresses = [*("" for _ in self.encoders), *(each.address for each in self.controls)]
        everybody = [*self.encoders, *self.pds]
        return {
            "port": 0,
            "model": "demo",
            "secret_file": secret_file(),
            "elastic_encode": False,
            "choice": choice,
            "instances": [
                {"name": each.name, "role": each.role, "url": each.serving.url, "control": control}
                for each, control in zip(everybody, addresses, strict=True)
            ],
        }


async def start_router(settings: dict[str, Any]) -> tuple[asyncio.subprocess.Process, str]:
    """Start a router; return its process and its address."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epd_portable.router", "--settings", json.dumps(settings)),
        stderr=log,
        env={**os.environ, "EPD_LOG_LEVEL": "INFO"},
    )
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(600):
            log.seek(0)
            if found := re.search(r"http://127\.0\.0\.1:\d+", log.read()):
                try:
                    health = await client.get(f"{found[0]}/health", auth=Signed())
                except httpx.HTTPError:
                    pass
                else:
                    if health.json().get("counts", {}).get("up") == 2 * INSTANCES:
                        return process, found[0]
            await asyncio.sleep(0.1)
    raise RuntimeError("the router did not start")


async def measure(routers: int, choice: dict[str, Any] | None, seed: int) -> dict[str, float]:
    """Return figures of one run."""
    played, chance = Played(seed), random.Random(seed)
    for each in (*played.encoders, *played.pds):
        await each.serving.start()
    started = [await start_router(played.settings(choice)) for _ in range(routers)]
    parts = [picture() for _ in range(PICTURES)]
    weights = [1 / (rank + 1) for rank in range(PICTURES)]
    asked = iter(chance.choices(range(PICTURES), weights, k=REQUESTS))
    turn = iter(range(REQUESTS))
    used: set[int] = set()
    samples: list[list[int]] = []

    async def client(session: httpx.AsyncClient) -> None:
        for number in asked:
            used.add(number)
            url = started[next(turn) % routers][1]
            content = [parts[number], {"type": "text", "text": "What is this?"}]
            body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
            response = await session.post(f"{url}/v1/chat/completions", json=body)
            response.raise_for_status()

    async def sample() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            samples.append([played.in_flight[each.name] for each in played.pds])

    sampling = [asyncio.create_task(sample()), asyncio.create_task(played.report())]
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
    for task in sampling:
        task.cancel()
    await asyncio.gather(*sampling, return_exceptions=True)
    for process, _ in started:
        process.terminate()
        await process.wait()
    for each in (*played.encoders, *played.pds):
        await each.serving.stop()
    for control in played.controls:
        control.close()
    full = [each for each in samples if sum(each) >= CLIENTS / 2]
    return {
        "busiest_by_mean": statistics.mean(max(each) * len(each) / sum(each) for each in full),
        "encoders_by_picture": sum(map(bool, played.encoded.values())) / len(used),
    }


async def main() -> None:
    """Print the figures of all runs."""
    for name, choice in CHOICES.items():
        for routers in (1, 2, 4):
            runs = [await measure(routers, choice, seed) for seed in range(3)]
            for figure in runs[0]:
                values = [run[figure] for run in runs]
                print(
                    f"{name}, {routers} router(s): {figure} {statistics.median(values):.2f} "
                    f"({min(values):.2f} to {max(values):.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    asyncio.run(main())
