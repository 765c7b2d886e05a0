"""Reports of how busy an engine is, and what it has been sent since."""

from __future__ import annotations

from epd_portable.placement.instances import EndpointPool, LoadReport
from tests.unit.builders import instance_settings


def test_report_counts_until_its_instance_goes_down() -> None:
    instances = EndpointPool()
    pd = instances.add(instance_settings("pd0", "prefill-decode"))
    pd.health.seen_up()
    assert pd.reported is None
    report = LoadReport(waiting=2, running=3, kv_used=0.5)
    pd.take_report(report)
    assert pd.reported == report
    pd.note_elsewhere(2, 3.0)
    pd.seen_gone("killed")
    assert (pd.reported, pd.load, pd.pending_encode_s) == (None, 0, 0)


def test_requests_sent_since_a_report_count_as_waiting() -> None:
    instances = EndpointPool()
    for name, role in (("e0", "encode"), ("pd0", "prefill-decode")):
        instances.add(instance_settings(name, role)).health.seen_up()  # type: ignore[arg-type]
    pd, encoder = instances.of_duty("decode")[0], instances.of_duty("encode")[0]
    with pd.in_flight(), pd.in_flight():
        # Both are on their way into the engine, whose report counts another one.
        pd.take_report(LoadReport(waiting=1, running=0))
        known = pd.reported
        assert known is not None and known.waiting == 2
        with pd.in_flight(), pd.in_flight():
            known = pd.reported
            assert known is not None and known.waiting == 4
    encoder.take_report(LoadReport(items=3))
    with encoder.in_flight():
        known = encoder.reported
        assert known is not None and known.items == 4


def test_work_of_other_fronts_replaces_their_former_report() -> None:
    encoder = EndpointPool().add(instance_settings("e0", "encode"))
    with encoder.encoding(0.5):
        for jobs, seconds in ((3, 12.5), (1, 2.0), (0, 0.0)):
            encoder.note_elsewhere(jobs, seconds)
            assert (encoder.load, encoder.elsewhere) == (jobs, jobs)
            assert (encoder.pending_encode_s, encoder.backlog_s) == (seconds + 0.5, seconds + 0.5)
