from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.fleet.engine_loads import OLD_AFTER_S, EngineLoads
from epd_portable.router.fleet.instances import Fleet
from epd_portable.router.http.upstream import Upstream
from epd_portable.wire.messages import LoadReport
from tests.keyring import keys
from tests.unit.router.test_chooser import fleet


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def control() -> AsyncIterator[ControlChannels]:
    channels = ControlChannels(keys())
    yield channels
    await channels.close()


def made(control: ControlChannels) -> tuple[Fleet, Clock, EngineLoads]:
    instances, clock = fleet(encoders=1, pds=1), Clock()
    return instances, clock, EngineLoads(instances, control, Upstream(), clock)


async def test_a_load_has_its_age_and_is_unknown_when_it_is_old(control: ControlChannels) -> None:
    instances, clock, loads = made(control)
    pd = instances.of_duty("answer")[0]
    assert loads.of(pd) is None
    assert control.on_load is not None
    control.on_load(pd.name, LoadReport(waiting=2, running=3, kv_used=0.5))
    clock.now += 1
    known = loads.of(pd)
    assert known is not None
    assert (known.waiting, known.running, known.kv_used, known.items) == (2, 3, 0.5, None)
    assert known.age_s == 1
    clock.now += OLD_AFTER_S
    assert loads.of(pd) is None


async def test_who_went_down_has_no_load_until_it_tells_again(control: ControlChannels) -> None:
    instances, _, loads = made(control)
    pd = instances.of_duty("answer")[0]
    loads.told(pd.name, LoadReport(waiting=2))
    pd.seen_gone("killed")
    assert loads.of(pd) is None
    loads.told("nobody", LoadReport(waiting=2))


async def test_what_was_given_since_waits_there_too(control: ControlChannels) -> None:
    instances, _, loads = made(control)
    pd, encoder = instances.of_duty("answer")[0], instances.of_duty("encode")[0]
    with pd.working(), pd.working():
        # Both are on their way into the engine, which knows of somebody else's.
        loads.told(pd.name, LoadReport(waiting=1, running=0))
        known = loads.of(pd)
        assert known is not None and known.waiting == 2
        with pd.working(), pd.working():
            known = loads.of(pd)
            assert known is not None and known.waiting == 4
    loads.told(encoder.name, LoadReport(items=3, pixels=7))
    with encoder.working():
        known = loads.of(encoder)
        assert known is not None and (known.items, known.pixels) == (4, 7)
