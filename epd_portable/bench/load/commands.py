"""What `epd-bench load` says to the process of its clients, and what that answers.

One JSON object a line, each way.
"""

from __future__ import annotations

import msgspec


class PictureSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One picture of a request.

    Attributes:
        seed: Decides the content: two pictures are the same if their seeds and sizes are.
        size: Side in pixels.
        format: ``png`` or ``jpeg``.
    """

    seed: int
    size: int
    format: str


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        at_s: When it is sent, from the beginning of the run; nothing to a closed loop.
        seed: Decides the text.
        words: Words of the text.
        output_tokens: Length of the answer.
        pictures: In front of the text; of a conversation, of its first one.
        history: Seeds of the texts of earlier turns of a conversation, which are sent again, each
            with an answer.
    """

    at_s: float
    seed: int
    words: int
    output_tokens: int
    pictures: tuple[PictureSpec, ...] = ()
    history: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """How its figures are grouped."""
        return "pictures" if self.pictures else "text"


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the bodies of these requests, which the runs until the next `Prepare` send."""

    asks: tuple[Ask, ...]


class Send(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send what was prepared, and end when everything has an answer or has taken too long.

    Attributes:
        name: The ids of the requests begin with it.
        urls: Base addresses; the requests go to each in turn.
        model: Name of the model there.
        concurrency: So many clients, of which each sends when it has its answer; 0 sends each
            request at its time.
        timeout_s: Longest time of a request.
    """

    name: str
    urls: tuple[str, ...]
    model: str
    concurrency: int
    timeout_s: float


Command = Prepare | Send
"""To the clients."""


class TimedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request; times in seconds.

    Attributes:
        sent_s: When it was sent, from the beginning of the run.
        late_s: How much later that was than it was due.
        ttft_s: From there to the first token; negative for none.
        gaps_s: Between each piece of the answer and the one before it.
        e2e_s: From the sending to the end.
        tokens: Tokens of the answer, as the server counts them.
        prompt_tokens: The same of the request.
        problem: Why it does not count as answered; empty if it does.
    """

    sent_s: float
    late_s: float
    ttft_s: float
    gaps_s: tuple[float, ...]
    e2e_s: float
    tokens: int
    prompt_tokens: int
    problem: str


class ClientsDone(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a command.

    Attributes:
        answers: In the order of the requests; none to `Prepare`.
        begin_s: When a run began, on the monotonic clock of the host.
        cpu_s: CPU time that the clients took.
        wall_s: Duration.
    """

    answers: tuple[TimedAnswer, ...] = ()
    begin_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
