"""``python -m epd_portable.demo.run``: an image's way through two instances, shown and checked.

Starts one encode and one prefill+decode instance and their front, sends a question about an
image that it draws and prints the response; then sends it to plain vLLM in one process and
compares tokens and log-probabilities.
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

from epd_portable.config.instance import PLATFORMS
from epd_portable.config.load import load_topology
from epd_portable.demo import servers
from epd_portable.demo.pictures import QUESTIONS, Picture, QuestionKind, draw
from epd_portable.errors import EPDError

QUESTION = QUESTIONS[QuestionKind.DESCRIBE]
LOGPROB_TOLERANCE = 0.1
"""Between two runs in bfloat16; the tests compare float32 within 1e-3."""
COMPARED_TOKENS = 5
_MAX_TOKENS = 24
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A chat completion.

    Attributes:
        item: Report of the generating instance on the image; empty for one process.
        latency_s: From the request to the end of the response.
    """

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    item: dict[str, Any]
    latency_s: float


def request_answer(url: str, picture: Picture) -> Completion:
    """Send the question about an image.

    Raises:
        EPDError: The server refused.
    """
    content = [
        {"type": "image_url", "image_url": {"url": picture.data_url()}},
        {"type": "text", "text": QUESTION},
    ]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": _MAX_TOKENS,
        "logprobs": True,
    }
    begin_s = time.monotonic()
    url = f"{url}/v1/chat/completions"
    response = httpx.post(url, json=body, timeout=_TIMEOUT_S, trust_env=False)
    if response.status_code != httpx.codes.OK:
        raise EPDError(f"{url} returned status {response.status_code}: {response.text}")
    answer = response.json()
    choice = answer["choices"][0]
    steps = choice["logprobs"]["content"]
    items = (answer.get("ec_transfer_params") or {}).get("items") or [{}]
    return Completion(
        text=choice["message"]["content"],
        tokens=tuple(step["token"] for step in steps),
        logprobs=tuple(step["logprob"] for step in steps),
        item=items[0],
        latency_s=time.monotonic() - begin_s,
    )


def difference(split: Completion, reference: Completion) -> str:
    """Return the differences between two responses."""
    if split.tokens != reference.tokens:
        return f"tokens differ: {split.text!r} split, {reference.text!r} in one process"
    pairs = zip(split.logprobs, reference.logprobs, strict=True)
    worst = max(abs(one - other) for one, other in list(pairs)[:COMPARED_TOKENS])
    if worst > LOGPROB_TOLERANCE:
        return f"log-probabilities differ by {worst:.4f}, allowed are {LOGPROB_TOLERANCE}"
    if split.item.get("source") != "transfer":
        return f"the item came from {split.item.get('source', 'nowhere')}, not from the encoder"
    return ""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 0 only if both ways give the same response."""
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
    parser.add_argument("--seed", type=int, default=20, help="which image to draw (default 20)")
    options = parser.parse_args(argv)
    # The demo shows where items came from.
    settings = ["front.item_outcomes=true", *options.settings]
    try:
        with tempfile.TemporaryDirectory(prefix="epd-demo-") as folder:
            picture = draw(options.seed)
            split, reference = ask_both(
                picture, options.config, options.platform, settings, Path(folder)
            )
    except EPDError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    _say(f"in one process {reference.text}")
    if problem := difference(split, reference):
        _say(f"NOT EQUAL: {problem}")
        return 1
    _say("equal:         tokens and log-probabilities are those of one process")
    return 0


def ask_both(
    picture: Picture, config: Path, platform: str, settings: list[str], folder: Path
) -> tuple[Completion, Completion]:
    """Return the responses of a topology, which is shown, and of plain vLLM in one process."""
    topology = load_topology(config, platform=platform, overrides=settings)
    reference = servers.one_process(
        topology.model,
        log=folder / "reference.log",
        engine_args=topology.engine_args,
        platform=platform,
        # As the launcher has it where `enforce_eager` is set.
        env={"TORCH_COMPILE_DISABLE": "1"} if topology.engine_args.get("enforce_eager") else {},
        report=_say,
    )
    _say("starting 1 encode + 1 prefill+decode instance of vLLM")
    with servers.topology(
        config,
        platform=platform,
        log_dir=folder / "split",
        settings=settings,
        report=_say,
    ) as server:
        split = request_answer(server.url, picture)
        _show(picture, split)
        _say("stopping the topology")
    _say("starting plain vLLM in one process, for comparison")
    with reference as server:
        return split, request_answer(server.url, picture)


def _show(picture: Picture, split: Completion) -> None:
    item = split.item
    _say(
        f"""
image:         {picture.scene.answer(QuestionKind.DESCRIBE)}
question:      {QUESTION}
answer:        {split.text}
encoded by:    {item.get("encoder") or "the prefill+decode instance itself"}
transfer path: {item.get("path") or "none"}, {item.get("nbytes", 0)} bytes
time:          {item.get("transfer_ms", 0)} ms from the grant to the written item, \
{item.get("wait_ms", 0)} ms until the item was there, {split.latency_s * 1000:.0f} ms \
for the whole response
"""
    )


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
