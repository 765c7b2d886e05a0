"""Instances at fronts, in a time of their own: joined, refused, removed, gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from epd_portable.config.schema import Launch
from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError, RefusedError
from epd_portable.launch.notices import Notice
from epd_portable.launch.run import fronts
from epd_portable.launch.run.fronts import Registrar
from tests.unit.launch.own_time import in_own_time, now
from tests.unit.launch.plans import plan_of

URL, NAME = "http://127.0.0.1:8000", "encode-0@here"
OWN = "model: demo\nsecret_file: s\ninstances: {encode: {count: 0}}\n"
JOINING = f"""
model: demo
secret_file: s
launch: {{join: '{URL}', name: here}}
instances: {{prefill_decode: {{count: 0}}}}
"""
Work = Callable[[], Coroutine[Any, Any, None]]
BEGUN_S = 50.0
"""Time at which all processes are up."""
LIMIT = "(launch.startup_timeout_s)"
AWAY = LaunchError(f"front {URL} cannot be reached")
NAMELESS = LaunchError("fronts has no address")
TAKEN = LaunchError(f"front {URL}: take another name")


class Front:
    """A front, as its client sees it.

    Attributes:
        state: Of an instance that it has; ``None`` while it has none.
        error: Raised by every request.
        refusal: Raised by a registration.
    """

    def __init__(self, state: str | None = None) -> None:
        self.id, self.name = "a", NAME
        self.state = state
        self.error: LaunchError | None = None
        self.refusal: LaunchError | None = None

    def __str__(self) -> str:
        return URL

    async def look(self) -> tuple[str, list[dict[str, Any]]]:
        if self.error:
            raise self.error
        reason = "" if self.state == "up" else f"it is {self.state}"
        seen = {"name": self.name, "state": self.state, "reason": reason}
        return self.id, [seen] if self.state else []

    async def instances(self) -> list[dict[str, Any]]:
        return (await self.look())[1]

    async def request(
        self, method: str, path: str = "", content: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        if self.refusal or self.error:
            raise self.refusal or self.error or AssertionError
        self.state = "up" if method == "POST" else "draining"
        return {"front": self.id}


class Joining:
    """A launcher of one instance with one front, its own or another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, front: Front, *, is_own: bool) -> None:
        self.front = front
        self.said: list[str] = []
        self.is_up = True
        self.addresses = ["10.0.0.1"]

        async def addresses_of(url: str) -> list[str]:
            if not self.addresses:
                raise NAMELESS
            return self.addresses

        async def is_up(name: str) -> bool:
            return self.is_up

        monkeypatch.setattr(fronts, "FrontClient", lambda *_, **__: front)
        monkeypatch.setattr(fronts, "addresses_of", addresses_of)
        plan = plan_of(OWN if is_own else JOINING)
        front.name = plan.processes[0].name
        self.registrar = Registrar(
            plan,
            Launch(startup_timeout_s=6.0),
            Secret("0" * 64),
            is_up=is_up,
            leave_timeout_s=20.0,
            say=self._say,
        )

    def _say(self, notice: Notice) -> None:
        self.said.append(notice.text)

    async def until(self, condition: Callable[[], bool]) -> None:
        end = now() + 100.0
        while not condition():
            assert now() < end, self.said
            await asyncio.sleep(0.1)

    def follow(self, work: Work, then: Work | None = None) -> None:
        """Do some work while the front is followed, and some after that."""

        async def both() -> None:
            await asyncio.sleep(BEGUN_S)
            assert not self.registrar.have_joined(), "it is not followed yet"
            following = asyncio.ensure_future(self.registrar.follow())
            try:
                await work()
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            if then:
                await then()

        in_own_time(both())


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Joining:
    return Joining(monkeypatch, Front("warming"), is_own=True)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Joining:
    return Joining(monkeypatch, Front(), is_own=False)


def test_instance_not_up_in_time_ends_the_start_with_the_reason(own: Joining) -> None:
    text = f"instances are not up at the front after 6 s {LIMIT}: {own.front.name}: it is warming"

    async def work() -> None:
        with pytest.raises(LaunchError) as ended:
            await own.until(own.registrar.have_joined)
        assert str(ended.value) == text
        assert now() == pytest.approx(BEGUN_S + 6.0, abs=0.2)
        assert str(own.registrar.problems()[own.front.name]) == "it is warming"
        own.front.state = "up"
        await own.until(lambda: not own.registrar.problems())
        own.front.error = AWAY
        await asyncio.sleep(5.0)
        assert own.said == [], "its process is reported by its lifecycle"

    own.follow(work)


@pytest.mark.parametrize(
    ("error", "said"),
    [(AWAY, f"{NAME}: {AWAY}"), (NAMELESS, f"front {URL}: {NAMELESS}")],
    ids=["unreachable", "without address"],
)
def test_front_that_is_away_is_reported_once_and_ends_the_start(
    other: Joining, error: LaunchError, said: str
) -> None:
    other.front.error = error
    other.addresses = [] if error is NAMELESS else other.addresses

    async def work() -> None:
        with pytest.raises(LaunchError) as ended:
            await other.until(other.registrar.have_joined)
        assert str(ended.value) == (
            f"instances are not up at {URL} after 6 s {LIMIT}: {NAME}: {error}"
        )
        assert other.said == [said]

    other.follow(work)


def test_transient_refusal_is_reported_once_and_repeated(other: Joining) -> None:
    other.front.refusal = TAKEN

    async def work() -> None:
        await other.until(lambda: now() > BEGUN_S + 3.0)
        assert not other.registrar.have_joined()
        assert str(other.registrar.problems()[NAME]) == str(TAKEN)
        other.front.refusal = None
        await other.until(other.registrar.have_joined)
        assert other.said == [f"{NAME}: {TAKEN}", f"{NAME} has joined {URL}"]

    other.follow(work)


def test_final_refusal_ends_the_start_at_once(other: Joining) -> None:
    other.front.refusal = RefusedError("it was made with another secret_file")

    async def work() -> None:
        with pytest.raises(LaunchError, match=f"^{NAME} cannot join: it was made with another"):
            await other.until(other.registrar.have_joined)
        assert now() < BEGUN_S + 1.0

    other.follow(work)


def test_removed_instance_joins_again_when_it_responds(other: Joining) -> None:
    async def work() -> None:
        await other.until(other.registrar.have_joined)
        other.front.state, other.is_up = None, False
        await other.until(lambda: now() > BEGUN_S + 30.0)
        assert other.said[1:] == [f"{NAME}: front {URL} has removed it"]
        other.is_up = True
        await other.until(lambda: not other.registrar.problems())
        assert other.said[2:] == [f"{NAME} has joined {URL}"]

    other.follow(work)


def test_instance_joins_a_front_that_has_restarted(other: Joining) -> None:
    async def work() -> None:
        await other.until(other.registrar.have_joined)
        other.front.state, other.front.id = None, "b"
        await other.until(lambda: len(other.said) > 1)
        assert other.said[1:] == [f"{NAME} has joined {URL} again: the front has restarted"]

    other.follow(work)


def test_front_without_name_and_response_is_followed_no_more(other: Joining) -> None:
    async def work() -> None:
        await other.until(other.registrar.have_joined)
        other.addresses = ["10.0.0.2"]
        await other.until(lambda: now() > BEGUN_S + 30.0)
        assert other.said[1:] == [f"{NAME} has joined {URL}"], "it is at both addresses"
        other.front.error = AWAY
        await other.until(lambda: now() > BEGUN_S + 60.0)
        assert sorted(other.said[2:]) == [f"{NAME}: {AWAY}", f"{NAME}: front {URL} has gone"]

    other.follow(work)


@pytest.mark.parametrize("ends", [True, False])
def test_instance_leaves_when_its_requests_end_or_time_is_over(other: Joining, ends: bool) -> None:
    async def join() -> None:
        await other.until(other.registrar.have_joined)

    async def leave() -> None:
        begun, leaving = now(), asyncio.ensure_future(other.registrar.leave())
        await asyncio.sleep(10.0)
        assert not leaving.done() and other.front.state == "draining"
        if ends:
            other.front.state = None
        await leaving
        said = f"{NAME} has left {URL}" if ends else f"{NAME}: front {URL}: requests are still open"
        assert other.said[1:] == [said]
        assert now() - begun == pytest.approx(10.0 if ends else 20.0, abs=0.3)

    other.follow(join, leave)
