"""Scores a served demo model: ``python -m epd_portable.demo.score --url http://127.0.0.1:8000``.

Every answer is compared as a whole string, with pictures that training never saw.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from epd_portable.demo.pictures import HELD_OUT_SEEDS, QUESTIONS, Picture, QuestionKind, draw
from epd_portable.errors import ConfigError, EngineError

SCORED_KINDS = (QuestionKind.DESCRIBE, QuestionKind.COUNT)
"""Questions about every picture."""
_REQUESTS_IN_FLIGHT = 4
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedAnswer:
    """One question that was put to the endpoint."""

    seed: int
    kind: QuestionKind
    expected: str
    given: str

    @property
    def right(self) -> bool:
        """Whether the whole answer equals the expected one."""
        return self.given == self.expected


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """All answers of one evaluation."""

    answers: tuple[GradedAnswer, ...]

    @property
    def exact_match(self) -> float:
        """Share of all answers that are exactly right."""
        return _share(self.answers)

    @property
    def by_kind(self) -> dict[QuestionKind, float]:
        """Share of exactly right answers for each kind of question."""
        return {kind: _share([a for a in self.answers if a.kind is kind]) for kind in SCORED_KINDS}

    @property
    def wrong(self) -> list[GradedAnswer]:
        """The answers that are not exactly right."""
        return [answer for answer in self.answers if not answer.right]


def _share(answers: Sequence[GradedAnswer]) -> float:
    return sum(answer.right for answer in answers) / len(answers)


def held_out_pictures(n: int, seed: int) -> list[Picture]:
    """Draw ``n`` pictures that training never saw, starting at the held-out seed ``seed``.

    Raises:
        ConfigError: The seeds asked for are not all held out.
    """
    if n < 1 or seed < 0 or seed + n > len(HELD_OUT_SEEDS):
        raise ConfigError(
            f"cannot score {n} pictures from seed {seed}: take at least one, and seeds from 0 to "
            f"{len(HELD_OUT_SEEDS) - 1}, which training leaves alone"
        )
    return [draw(s) for s in HELD_OUT_SEEDS[seed : seed + n]]


def evaluate(base_url: str, n: int = 200, seed: int = 0) -> Score:
    """Ask an OpenAI endpoint about held-out pictures.

    Args:
        base_url: Server, without ``/v1``.
        n: Number of pictures; each is asked about once for each of `SCORED_KINDS`.
        seed: First held-out seed.

    Raises:
        ConfigError: The seeds asked for are not all held out.
        EngineError: The endpoint cannot be reached or refused a request.
    """
    pictures = held_out_pictures(n, seed)
    with (
        httpx.Client(base_url=base_url, timeout=_TIMEOUT_S) as client,
        ThreadPoolExecutor(_REQUESTS_IN_FLIGHT) as threads,
    ):
        models = _call(client, "GET", "/v1/models").json()["data"]
        if not models:
            raise EngineError(f"{base_url} serves no model: check what it was started with")
        answers = threads.map(
            lambda asked: _ask(client, models[0]["id"], *asked),
            [(picture, kind) for picture in pictures for kind in SCORED_KINDS],
        )
        return Score(answers=tuple(answers))


def _ask(client: httpx.Client, model: str, picture: Picture, kind: QuestionKind) -> GradedAnswer:
    content = [
        {"type": "image_url", "image_url": {"url": picture.data_url()}},
        {"type": "text", "text": QUESTIONS[kind]},
    ]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 32,
    }
    reply = _call(client, "POST", "/v1/chat/completions", body)
    return GradedAnswer(
        seed=picture.seed,
        kind=kind,
        expected=picture.scene.answer(kind),
        given=reply.json()["choices"][0]["message"]["content"],
    )


def _call(client: httpx.Client, method: str, path: str, body: object = None) -> httpx.Response:
    try:
        reply = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise EngineError(f"{method} {path} failed ({error!r}): is the server up?") from error
    if reply.is_error:
        raise EngineError(f"{method} {path} answered {reply.status_code}: {reply.text[:500]}")
    return reply


def main(argv: Sequence[str] | None = None) -> int:
    """Score an endpoint; returns 0 at or above the threshold, 1 below, 2 if it cannot be asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server, without /v1")
    parser.add_argument("--n", type=int, default=200, help="number of pictures")
    parser.add_argument("--seed", type=int, default=0, help="first held-out seed")
    parser.add_argument("--threshold", type=float, default=0.95, help="least share to exit with 0")
    options = parser.parse_args(argv)
    try:
        score = evaluate(options.url, options.n, options.seed)
    except (ConfigError, EngineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for answer in score.wrong:
        print(f"seed {answer.seed}: expected {answer.expected!r}, got {answer.given!r}")
    for kind, share in score.by_kind.items():
        print(f"{kind.value:<11} {share:.1%} exactly right")
    print(f"{'all':<11} {score.exact_match:.1%} of {len(score.answers)} answers")
    return 0 if score.exact_match >= options.threshold else 1


if __name__ == "__main__":
    sys.exit(main())
