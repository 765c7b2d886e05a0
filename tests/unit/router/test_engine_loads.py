from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from epd_portable.config.choice import parse_choice
from epd_portable.delivery.instances import EndpointPool, Instance, Use
from epd_portable.router.choice.policy import Policy
from epd_portable.router.choice.selection_types import Explanation
from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.fleet.engine_loads import OLD_AFTER_S, EngineLoads
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.selector import EndpointSelector
from epd_portable.wire.messages import LoadReport
from tests.keyring import keys
from tests.unit.router.test_selector import begun, fleet, settings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def control() -> AsyncIterator[ControlChannels]:
    channels = ControlChannels(keys())
    yield channels
    await channels.close()


def made(control: ControlChannels) -> tuple[EndpointPool, Clock, EngineLoads]:
    instances, clock = fleet(encoders=1, pds=1), Clock()
    return instances, clock, EngineLoads(instances, control, Upstream(), clock)


async def test_a_load_has_its_age_and_is_unknown_when_it_is_old(control: ControlChannels) -> None:
    instances, clock, loads = made(control)
    pd = instances.of_duty("answer")[0]
    assert pd.reported is None
    assert control.on_load is not None
    control.on_load(pd.name, LoadReport(waiting=2, running=3, kv_used=0.5))
    clock.now += 1
    known = pd.reported
    assert known is not None
    assert (known.waiting, known.running, known.kv_used, known.items) == (2, 3, 0.5, None)
    loads.drop_old()
    assert pd.reported is not None
    clock.now += OLD_AFTER_S
    loads.drop_old()
    assert pd.reported is None


async def test_who_went_down_has_no_load_until_it_tells_again(control: ControlChannels) -> None:
    instances, _, loads = made(control)
    pd = instances.of_duty("answer")[0]
    loads.take(pd.name, LoadReport(waiting=2))
    pd.seen_gone("killed")
    assert pd.reported is None
    loads.take("nobody", LoadReport(waiting=2))


async def test_what_was_given_since_waits_there_too(control: ControlChannels) -> None:
    instances, _, loads = made(control)
    pd, encoder = instances.of_duty("answer")[0], instances.of_duty("encode")[0]
    with pd.working(), pd.working():
        # Both are on their way into the engine, which knows of somebody else's.
        loads.take(pd.name, LoadReport(waiting=1, running=0))
        known = pd.reported
        assert known is not None and known.waiting == 2
        with pd.working(), pd.working():
            known = pd.reported
            assert known is not None and known.waiting == 4
    loads.take(encoder.name, LoadReport(items=3, pixels=7))
    with encoder.working():
        known = encoder.reported
        assert known is not None and (known.items, known.pixels) == (4, 7)


BUSY = """
plugins:
- {type: decode-filter}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: active-request-scorer}
- {type: load-aware-scorer}
schedulingProfiles:
- name: decode
  plugins:
  - {pluginRef: decode-filter}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 3}
  - {pluginRef: active-request-scorer}
  - {pluginRef: load-aware-scorer}
"""


async def test_each_choice_knows_what_was_given_and_told_until_then(
    control: ControlChannels,
) -> None:
    instances = EndpointPool()
    for number in range(40):
        instances.add(settings(f"pd{number}", "prefill-decode")).seen_well()
    clock, chance = Clock(), random.Random(5)
    loads = EngineLoads(instances, control, Upstream(), clock)

    def policy() -> EndpointSelector:
        return EndpointSelector(instances, Policy(parse_choice(BUSY)), deciders=True, loads=loads)

    def said(one: EndpointSelector, tried: list[str]) -> dict[str, object]:
        explanation = Explanation()
        begun(one, explanation=explanation).choose_pd(tried)
        (decision,) = explanation.decisions
        return {"filters": decision.filters, **{k: round(v, 9) for k, v in decision.totals.items()}}

    seasoned = policy()
    uses: list[Use] = []
    for step in range(400):
        some = chance.choice(instances.all)
        event = chance.choice([0, 1, 3, 4, 5])
        if event == 0 and uses:
            uses.pop(chance.randrange(len(uses))).__exit__(None, None, None)
        elif event == 1:
            uses.append(some.working())
            uses[-1].__enter__()
        elif event == 3:
            clock.now += chance.choice([0.01, 1.0])
        elif step % 50 == 49:
            some.seen_gone("killed")
        elif step % 70 == 69:
            instances.remove(some.name)
            instances.add(settings(f"new{step}", "prefill-decode")).seen_well()
        else:
            for each in instances.all if step < 200 else (some,):
                load = LoadReport(waiting=chance.randrange(4), running=1, kv_used=chance.random())
                loads.take(each.name, load)
        tried = [some.name] if step % 7 == 0 else []
        # One that has never chosen before looks at everybody.
        assert said(seasoned, tried) == said(policy(), tried)


async def test_a_choice_measures_those_that_have_changed(
    control: ControlChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Instance] = []
    report = Instance.reported.fget
    assert report is not None

    def reported(instance: Instance) -> LoadReport | None:
        measured.append(instance)
        return report(instance)

    instances = EndpointPool()
    for number in range(300):
        instances.add(settings(f"pd{number}", "prefill-decode")).seen_well()
    loads = EngineLoads(instances, control, Upstream(), Clock())
    one = EndpointSelector(instances, Policy(parse_choice(BUSY)), loads=loads)
    begun(one).choose_pd(())
    monkeypatch.setattr(Instance, "reported", property(reported))
    for number, each in enumerate(instances.all[:20]):
        loads.take(each.name, LoadReport(waiting=number, kv_used=0.5))
        chosen = begun(one).choose_pd(())
        assert chosen is not None
        chosen.working().__enter__()
    assert 0 < len(measured) < 20 * 15
