"""What `epd-bench router` says to the processes that it starts, and what they answer.

One JSON object a line, each way.
"""

from __future__ import annotations

from typing import Any

import msgspec

from epd_portable.bench.router.questions import Verdict


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one kind to one address.

    Either ``rate`` is positive, and they are sent at that rate whatever becomes of those before, or
    each of ``connections`` sends its next one when it has its answer.

    Attributes:
        name: For results.
        port: Of the loopback address.
        first_number: Of the first question; the others count on from it.
        count: Most requests.
        seconds: No request begins after this time; 0 is no limit.
        start_s: Time before the first.
        rate: Requests a second.
        connections: See above; with a rate, connections that are opened beforehand and take turns.
        chunks: As in `Question`, like the next two.
        gap_ms: As above.
        first_ms: As above.
        picture_bytes: Size of a picture that is asked about, or 0.
        hold: An answer counts as soon as it begins, and stays open until `Release`.
        leave: So many of the requests, spread evenly, are given up ...
        leave_after_s: ... after this time.
        timeout_s: Longest time of an exchange.
    """

    name: str
    port: int
    first_number: int
    count: int
    seconds: float = 0.0
    start_s: float = 0.0
    rate: float = 0.0
    connections: int = 0
    chunks: int = 0
    gap_ms: int = 0
    first_ms: int = 0
    picture_bytes: int = 0
    hold: bool = False
    leave: int = 0
    leave_after_s: float = 0.0
    timeout_s: float = 60.0


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run flows beside each other, and end when all have ended."""

    flows: list[Flow]


class Watch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Count the tokens of the answers that are held, for a time."""

    seconds: float


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go away from all answers that are held."""


Command = Run | Watch | Release
"""To the load."""


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request and what became of it; times in seconds.

    Attributes:
        begin_s: When it was sent, since the run began.
        late_s: How much later than its flow's rate says.
        first_s: From there to the first byte of the answer's body; -1 if there was none.
        total_s: From there to the end.
        verdict: On the answer.
        detail: Why it is not ``right``.
    """

    begin_s: float
    late_s: float
    first_s: float
    total_s: float
    verdict: Verdict
    detail: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The load's answer to every command.

    Attributes:
        flows: The exchanges of each flow by its name.
        tokens: Seen by `Watch`.
        cpu_s: CPU time that the load used meanwhile.
        wall_s: How long that was.
    """

    flows: dict[str, list[AnswerRecord]] = {}
    tokens: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


class InstanceAddress(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that is played.

    Attributes:
        name: Of it.
        role: ``encode`` or ``prefill-decode``.
        host: Loopback address.
        port: Of its HTTP.
        control: ZMQ address of its control channel; of role ``prefill-decode`` only.
    """

    name: str
    role: str
    host: str
    port: int
    control: str = ""

    def settings(self) -> dict[str, Any]:
        """Return what the router is told of it."""
        url = f"http://{self.host}:{self.port}"
        return {"name": self.name, "role": self.role, "url": url, "control": self.control}


class Cast(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one process plays.

    Attributes:
        instances: Of either role.
        secret_file: Of the deployment.
        encode_ms: How long an encode job takes.
        halves: Every event of a stream comes in two pieces, the second half a gap later, so that an
            end of the instance often cuts one.
    """

    instances: list[InstanceAddress]
    secret_file: str
    encode_ms: int = 0
    halves: bool = False


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What the instances of one process have seen; answered to every line.

    Attributes:
        requests: Questions that arrived.
        jobs: Encode jobs that arrived.
        open: Answers that are under way.
        gone: Answers that nobody waited for any more.
        probed: Instances that were asked for their health.
        probes: How often they were.
        cpu_s: CPU time of the process.
    """

    requests: int
    jobs: int
    open: int
    gone: int
    probed: int
    probes: int
    cpu_s: float
