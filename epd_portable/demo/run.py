"""``python -m epd_portable.demo.run``: a picture's way through two instances, shown and checked.

Starts one encode and one prefill+decode instance and the router, asks about a picture that it
draws, then asks plain vLLM in one process the same and compares tokens and log-probabilities.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from epd_portable.bench import servers
from epd_portable.config.load import PLATFORMS, load_topology
from epd_portable.demo.pictures import QUESTIONS, Picture, QuestionKind, draw
from epd_portable.errors import EPDError

LOGPROB_TOLERANCE = 0.1
"""Between two runs in bfloat16; the tests compare float32 within 1e-3."""
COMPARED_TOKENS = 5
_MAX_TOKENS = 24
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
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


def ask(url: str, picture: Picture, question: str) -> Answer:
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
    return Answer(
        text=choice["message"]["content"],
        tokens=tuple(step["token"] for step in steps),
        logprobs=tuple(step["logprob"] for step in steps),
        items=tuple((answer.get("ec_transfer_params") or {}).get("items", ())),
        latency_s=time.monotonic() - begin_s,
    )


def difference(split: Answer, reference: Answer) -> str:
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
            split, reference = _both(options, picture, question, Path(folder))
    except EPDError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    return _report(picture, question, split, reference)


def _both(
    options: argparse.Namespace, picture: Picture, question: str, folder: Path
) -> tuple[Answer, Answer]:
    _say("starting 1 encode + 1 prefill+decode instance of vLLM and the router")
    with servers.topology(
        options.config,
        platform=options.platform,
        log_dir=folder / "split",
        settings=options.settings,
        report=_say,
    ) as split_server:
        split = ask(split_server.url, picture, question)
        _say("answered; stopping the topology")
    _say("starting plain vLLM in one process, for comparison")
    config = load_topology(options.config, platform=options.platform, overrides=options.settings)
    with servers.one_process(
        config.model,
        log=folder / "reference.log",
        engine_args=config.engine_args,
        platform=options.platform,
        report=_say,
    ) as reference_server:
        return split, ask(reference_server.url, picture, question)


def _report(picture: Picture, question: str, split: Answer, reference: Answer) -> int:
    item = split.items[0] if split.items else {}
    print()
    print(f"picture:       {picture.scene.answer(QuestionKind.DESCRIBE)}")
    print(f"question:      {question}")
    print(f"answer:        {split.text}")
    print(f"in one process {reference.text}")
    print(f"encoded by:    {item.get('encoder') or 'the prefill+decode instance itself'}")
    print(f"transfer path: {item.get('path') or 'none'}, {item.get('nbytes', 0)} bytes")
    print(
        f"time:          {item.get('transfer_ms', 0)} ms from the grant to the written item, "
        f"{item.get('wait_ms', 0)} ms until the item was there, {split.latency_s * 1000:.0f} ms "
        "for the whole answer"
    )
    problem = difference(split, reference)
    if not problem and item.get("source") != "transfer":
        problem = f"the item came from {item.get('source') or 'nowhere'}, not from the encoder"
    if problem:
        print(f"NOT EQUAL: {problem}")
        return 1
    print("equal:         tokens and log-probabilities are those of one process")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
