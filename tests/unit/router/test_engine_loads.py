from __future__ import annotations

from epd_portable.placement.instances import OLD_REPORT_S, EndpointPool
from epd_portable.router import serving
from epd_portable.router.fleet.control import ControlChannels
from epd_portable.wire.messages import LoadReport
from tests.keyring import keys
from tests.unit.builders import instance_settings
from tests.unit.router.test_selector import fleet


async def test_a_report_counts_until_it_is_old_or_its_instance_goes_down() -> None:
    instances, now = EndpointPool(clock=lambda: now[0]), [100.0]
    instances.add(instance_settings("pd0", "prefill-decode")).seen_well()
    pd = instances.of_duty("answer")[0]
    assert pd.reported is None
    report = LoadReport(waiting=2, running=3, kv_used=0.5)
    instances.take_report(pd.name, report)
    for later_s, known in ((OLD_REPORT_S, report), (0.1, None)):
        now[0] += later_s
        assert pd.reported == known
    instances.take_report(pd.name, report)
    pd.seen_gone("killed")
    assert pd.reported is None
    instances.take_report("nobody", report)


async def test_what_was_given_since_waits_there_too() -> None:
    instances = fleet(encoders=1, pds=1)
    pd, encoder = instances.of_duty("answer")[0], instances.of_duty("encode")[0]
    with pd.working(), pd.working():
        # Both are on their way into the engine, which knows of somebody else's.
        instances.take_report(pd.name, LoadReport(waiting=1, running=0))
        known = pd.reported
        assert known is not None and known.waiting == 2
        with pd.working(), pd.working():
            known = pd.reported
            assert known is not None and known.waiting == 4
    instances.take_report(encoder.name, LoadReport(items=3, pixels=7))
    with encoder.working():
        known = encoder.reported
        assert known is not None and (known.items, known.pixels) == (4, 7)


MANY = 1100
"""More sockets than a ZMQ context has by default."""


async def test_there_is_a_channel_to_each_of_many_instances() -> None:
    control = ControlChannels(keys())
    try:
        # A machine that allows fewer files cannot show it.
        for number in range(min(MANY, serving.raise_file_limit() - 200)):
            control.connect(f"pd-{number}", "tcp://127.0.0.1:9")
    finally:
        await control.close()
