"""``python -m epd_portable.demo.run``: a picture's way through two instances, shown and checked.

Starts one encode and one prefill+decode instance and the router, asks about a picture that it
draws and prints the answer; then asks plain vLLM in one process the same and compares tokens and
log-probabilities. On a CPU with room for both, plain vLLM starts while the topology warms up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from psutil import virtual_memory

from epd_portable.bench import servers
from epd_portable.config.instance import PLATFORMS
from epd_portable.config.load import load_topology
from epd_portable.demo.pictures import QUESTIONS, Picture, QuestionKind, draw
from epd_portable.errors import EPDError
from epd_portable.platforms.traits import TRAITS

LOGPROB_TOLERANCE = 0.1
"""Between two runs in bfloat16; the tests compare float32 within 1e-3."""
COMPARED_TOKENS = 5
_MAX_TOKENS = 24
_TIMEOUT_S = 120.0
_ENGINES_ARE_UP = "router: warming up the instances"
_ROOM_BYTES = 6 << 30
"""Free memory with which plain vLLM fits in addition to the topology: 3.2 GB, and as much again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One chat completion.

    Attributes:
        text: What the model said.
        tokens: Its tokens.
        logprobs: Of those tokens.
        items: What the PD instance reports of the picture; empty for one process.
        latency_s: From the request to the whole answer.
    """

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    items: tuple[dict[str, Any], ...]
    latency_s: float


def request_answer(url: str, picture: Picture, question: str) -> Completion:
    """Ask one question about one picture.

    Raises:
        EPDError: The server refused.
    """
    content = [
        {"type": "image_url", "image_url": {"url": picture.data_url()}},
        {"type": "text", "text": question},
    ]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": _MAX_TOKENS,
        "logprobs": True,
    }
    begin_s = time.monotonic()
    response = httpx.post(
        f"{url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S, trust_env=False
    )
    if response.status_code != httpx.codes.OK:
        raise EPDError(f"{url} answered {response.status_code}: {response.text}")
    answer = response.json()
    choice = answer["choices"][0]
    steps = choice["logprobs"]["content"]
    return Completion(
        text=choice["message"]["content"],
        tokens=tuple(step["token"] for step in steps),
        logprobs=tuple(step["logprob"] for step in steps),
        items=tuple((answer.get("ec_transfer_params") or {}).get("items", ())),
        latency_s=time.monotonic() - begin_s,
    )


def difference(split: Completion, reference: Completion) -> str:
    """Return what differs between two answers, or nothing."""
    if split.tokens != reference.tokens:
        return f"tokens differ: {split.text!r} split, {reference.text!r} in one process"
    pairs = zip(split.logprobs, reference.logprobs, strict=True)
    worst = max(abs(one - other) for one, other in list(pairs)[:COMPARED_TOKENS])
    if worst > LOGPROB_TOLERANCE:
        return f"log-probabilities differ by {worst:.4f}, allowed are {LOGPROB_TOLERANCE}"
    return ""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 0 only if both ways give the same answer."""
    parser = argparse.ArgumentParser(prog="python -m epd_portable.demo.run", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/1e1pd.yaml"))
    parser.add_argument("--platform", default="cpu", choices=PLATFORMS)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="replace one key of the file for both, as in transfer.path=tcp",
    )
    parser.add_argument("--seed", type=int, default=20, help="which picture to draw (default 20)")
    options = parser.parse_args(argv)
    picture = draw(options.seed)
    question = QUESTIONS[QuestionKind.DESCRIBE]
    try:
        with tempfile.TemporaryDirectory(prefix="epd-demo-") as folder:
            return _show(options, picture, question, Path(folder))
    except EPDError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1


def _show(options: argparse.Namespace, picture: Picture, question: str, folder: Path) -> int:
    # The demo shows where items came from.
    options.settings = ["router.item_outcomes=true", *options.settings]
    config = load_topology(options.config, platform=options.platform, overrides=options.settings)
    reference = servers.one_process(
        config.model,
        log=folder / "reference.log",
        engine_args=config.engine_args,
        platform=options.platform,
        # As the launcher has it where `enforce_eager` asks for it.
        env={"TORCH_COMPILE_DISABLE": "1"} if config.engine_args.get("enforce_eager") else {},
        report=_say,
    )
    # Devices with memory of their own are the topology's, as long as it runs.
    shares_memory = not TRAITS[options.platform].needs_device_copy
    fits_together = shares_memory and virtual_memory().available >= _ROOM_BYTES
    with ExitStack() as ended, ThreadPoolExecutor() as pool:
        started: Future[servers.Server] | None = None

        def follow(line: str) -> None:
            nonlocal started
            _say(line)
            if fits_together and started is None and line.endswith(_ENGINES_ARE_UP):
                _say("starting plain vLLM in one process as well, for comparison")
                started = pool.submit(ended.enter_context, reference)

        _say("starting 1 encode + 1 prefill+decode instance of vLLM and the router")
        with servers.topology(
            options.config,
            platform=options.platform,
            log_dir=folder / "split",
            settings=options.settings,
            report=follow,
        ) as server:
            split = request_answer(server.url, picture, question)
            _report(picture, question, split)
            _say("stopping the topology")
        if started is None:
            _say("starting plain vLLM in one process, for comparison")
            started = pool.submit(ended.enter_context, reference)
        return _compare(split, request_answer(started.result().url, picture, question))


def _report(picture: Picture, question: str, split: Completion) -> None:
    item = split.items[0] if split.items else {}
    _say("")
    _say(f"picture:       {picture.scene.answer(QuestionKind.DESCRIBE)}")
    _say(f"question:      {question}")
    _say(f"answer:        {split.text}")
    _say(f"encoded by:    {item.get('encoder') or 'the prefill+decode instance itself'}")
    _say(f"transfer path: {item.get('path') or 'none'}, {item.get('nbytes', 0)} bytes")
    _say(
        f"time:          {item.get('transfer_ms', 0)} ms from the grant to the written item, "
        f"{item.get('wait_ms', 0)} ms until the item was there, {split.latency_s * 1000:.0f} ms "
        "for the whole answer"
    )
    _say("")


def _compare(split: Completion, reference: Completion) -> int:
    _say(f"in one process {reference.text}")
    item = split.items[0] if split.items else {}
    problem = difference(split, reference)
    if not problem and item.get("source") != "transfer":
        problem = f"the item came from {item.get('source') or 'nowhere'}, not from the encoder"
    if problem:
        _say(f"NOT EQUAL: {problem}")
        return 1
    _say("equal:         tokens and log-probabilities are those of one process")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
