"""Each alert rule fires on what it is for and on nothing else, as Prometheus's own tool finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.commands import run

ALERTS = Path(__file__).resolve().parents[2] / "docs/observability/alerts.yaml"
NAMES = [
    rule["alert"]
    for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
MINUTES = 60

pytestmark = pytest.mark.needs_prometheus

WELL = {
    'up{job="epd-front", instance="127.0.0.1:8000"}': "1",
    'up{job="epd-front", instance="127.0.0.1:8001"}': "1",
    'epd_front_instance_up{instance="encode-0", role="encode"}': "1",
    'epd_front_instance_up{instance="prefill-0", role="prefill"}': "1",
    'epd_front_instance_up{instance="pd-0", role="prefill-decode"}': "1",
    'epd_front_requests_total{status="200"}': "+60",
    'epd_front_requests_total{status="503"}': "+1",
    'vllm:request_success_total{finished_reason="error"}': "0",
    'vllm:request_success_total{finished_reason="stop"}': "+60",
    'vllm:time_to_first_token_seconds_bucket{le="2"}': "+60",
    'vllm:time_to_first_token_seconds_bucket{le="20"}': "+60",
    'vllm:time_to_first_token_seconds_bucket{le="+Inf"}': "+60",
    'vllm:inter_token_latency_seconds_bucket{le="0.05"}': "+60",
    'vllm:inter_token_latency_seconds_bucket{le="0.5"}': "+60",
    'vllm:inter_token_latency_seconds_bucket{le="+Inf"}': "+60",
    "epd_front_admission_waiting": "0",
    'epd_front_requests_total{status="429"}': "0",
    'epd_front_encode_jobs_total{instance="encode-0", end="encoded"}': "+60",
    'epd_front_encode_jobs_total{instance="encode-0", end="full"}': "+6",
    'epd_front_encode_jobs_total{instance="encode-0", end="lost"}': "+1",
    'epd_front_work_seconds_total{role="encode", modality="image", size="512"}': "+30",
    'epd_pd_fallbacks_total{reason="lease"}': "2",
    'epd_pd_transfers_failed_total{cause="timeout"}': "2",
    'epd_encode_write_failures_total{path="shm"}': "0",
    "epd_pd_transfers_waiting": "0",
    "epd_pd_stalls_total": "0",
    "epd_front_store_breaker": "0",
    "epd_pd_store_breaker": "1",
    "epd_encode_store_breaker": "0",
    'epd_pd_store_items_total{result="corrupt"}': "0",
    'epd_pd_store_items_total{result="hit"}': "+60",
    "epd_encode_store_writes_total": "+60",
    'epd_encode_store_drops_total{reason="full"}': "+1",
}
"""A deployment where little goes wrong: each series' value, or by how much it grows a minute."""
ENCODE_UP = 'epd_front_instance_up{instance="encode-0", role="encode"}'
SECOND_UP = 'epd_front_instance_up{instance="encode-1", role="encode"}'
ILL: dict[str, tuple[dict[str, str | None], int]] = {
    "EpdFrontDown": (
        dict.fromkeys(each for each in WELL if each.startswith("epd_front_instance_up")),
        4,
    ),
    "EpdNotScraped": ({'up{job="epd-front", instance="127.0.0.1:8001"}': "0"}, 7),
    "EpdNoServingInstance": (
        {'epd_front_instance_up{instance="pd-0", role="prefill-decode"}': "0"},
        3,
    ),
    "EpdInstanceDown": ({SECOND_UP: "0"}, 12),
    "EpdInstanceFlapping": ({SECOND_UP: "1 0 1 0 1 0 1 0 1x50"}, 12),
    "EpdRequestsFail": ({'epd_front_requests_total{status="503"}': "+10"}, 12),
    "EpdStreamsAborted": ({'vllm:request_success_total{finished_reason="error"}': "+1"}, 12),
    "EpdFirstTokenSlow": ({'vllm:time_to_first_token_seconds_bucket{le="2"}': "+50"}, 22),
    "EpdTokensSlow": ({'vllm:inter_token_latency_seconds_bucket{le="0.05"}': "+50"}, 22),
    "EpdAdmissionQueueing": ({"epd_front_admission_waiting": "1"}, 17),
    "EpdRequestsRefused": ({'epd_front_requests_total{status="429"}': "+1"}, 17),
    "EpdNoEncoder": ({ENCODE_UP: "0"}, 4),
    "EpdEncodeJobsFail": (
        {'epd_front_encode_jobs_total{instance="encode-0", end="lost"}': "+10"},
        17,
    ),
    "EpdEncodersTooFew": (
        {'epd_front_work_seconds_total{role="encode", modality="image", size="512"}': "+180"},
        27,
    ),
    "EpdEncodersFull": (
        {'epd_front_encode_jobs_total{instance="encode-0", end="full"}': "+30"},
        22,
    ),
    "EpdRedundantEncodes": ({'epd_pd_fallbacks_total{reason="lease"}': "+1"}, 22),
    "EpdTransfersLost": ({'epd_pd_transfers_failed_total{cause="timeout"}': "+1"}, 17),
    "EpdWritesFail": ({'epd_encode_write_failures_total{path="shm"}': "+1"}, 17),
    "EpdItemsStalled": ({"epd_pd_stalls_total": "+1"}, 3),
    "EpdItemSpaceExhausted": ({"epd_pd_transfers_waiting": "2"}, 12),
    "EpdNoPrefillInstance": (
        {'epd_front_instance_up{instance="prefill-0", role="prefill"}': "0"},
        4,
    ),
    "EpdStoreUnavailable": ({"epd_pd_store_breaker": "2"}, 12),
    "EpdStoreCorrupt": ({'epd_pd_store_items_total{result="corrupt"}': "+1"}, 12),
    "EpdStoreDropsOutputs": ({'epd_encode_store_drops_total{reason="full"}': "+30"}, 27),
}
"""For each alert what is different, and after how many minutes it must fire."""


def notation(value: str) -> str:
    """Return a series' values in promtool's notation, one a minute."""
    if " " in value:
        return value
    return f"0{value}x{MINUTES}" if value[0] == "+" else f"{value}x{MINUTES}"


def check(folder: Path, series: dict[str, str], minutes: int, firing: list[str]) -> None:
    """Ask promtool whether these alerts fire by then, and no others."""
    fires = 'count by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": notation(value)} for name, value in series.items()
        ],
        "promql_expr_test": [{"expr": fires, "eval_time": f"{minutes}m", "exp_samples": samples}],
    }
    file = folder / "cases.yaml"
    document = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [case]}
    file.write_text(yaml.safe_dump(document), "utf-8")
    done = run("promtool", "test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_few_failures_raise_no_alert(tmp_path: Path) -> None:
    check(tmp_path, WELL, MINUTES, [])


def test_deployment_without_prefill_and_store_raises_no_alert(tmp_path: Path) -> None:
    fewer = {name: value for name, value in WELL.items() if "store" not in name}
    del fewer['epd_front_instance_up{instance="prefill-0", role="prefill"}']
    check(tmp_path, fewer, MINUTES, [])


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_fires_on_what_it_is_for(name: str, tmp_path: Path) -> None:
    different, minutes = ILL[name]
    series = {each: value for each, value in (WELL | different).items() if value is not None}
    check(tmp_path, series, minutes, [name])
    check(tmp_path, series, 0, [])
