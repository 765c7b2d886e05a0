"""What both ends count of transfers between two processes, each by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from epd_portable import envs
from epd_portable.vllm_plugin import exposition
from tests.contract.pairs import ROUTES, Pair
from tests.integration.transfer.conftest import EncodeSide, PrefillSide
from tests.integration.transfer.encode_side import WIDTH

TOKEN_BYTES = WIDTH * 4
ON_CPU = [route for route in ROUTES if route.pair == Pair("cpu", "cpu")]

pytestmark = pytest.mark.parametrize("route", ON_CPU, ids=str, indirect=True)


def counted(registry: CollectorRegistry) -> dict[str, float]:
    """Return counters and gauges that are not zero, by the names that the page gives them."""
    lines = re.findall(
        r"^(epd_(?!\w*(?:seconds|created|embeddings))\S+) (\S+)$",
        generate_latest(registry).decode(),
        re.MULTILINE,
    )
    return {name: float(value) for name, value in lines if float(value)}


@pytest.fixture
def encode_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorRegistry]:
    """Shows what encode sides count that are started from now on."""
    registry = CollectorRegistry()
    folder = tmp_path / "metrics"
    monkeypatch.setenv(envs.EPD_METRICS_DIR.name, str(folder))
    registry.register(exposition.FolderCollector(folder))
    yield registry


@pytest.fixture
def encode(encode_registry: CollectorRegistry, encode: EncodeSide) -> EncodeSide:
    return encode


def test_both_ends_count_the_same_items_and_bytes(
    make_pd: Callable[..., PrefillSide],
    encode_registry: CollectorRegistry,
    encode: EncodeSide,
    path: str,
) -> None:
    pd = make_pd()
    for name, num_tokens in (("cat", 300), ("dog", 50)):
        pd.arrive(name, name, num_tokens)
        encode.tell("order", f"t-{name}", name, pd.address, num_tokens)
        encode.tell("output", name, num_tokens)
        pd.step_until(lambda name=name: name in pd.placed)
        pd.finish(name)
    sent = {
        'epd_encode_transfers_total{source="encoder"}': 2,
        'epd_encode_transfers_ended_total{result="settled"}': 2,
        f'epd_encode_sent_bytes_total{{path="{path}"}}': 350 * TOKEN_BYTES,
    }
    pd.step_until(lambda: counted(encode_registry).items() >= sent.items())
    assert counted(encode_registry) == sent
    received = {
        'epd_pd_items_total{source="transfer"}': 2,
        f'epd_pd_received_bytes_total{{path="{path}"}}': 350 * TOKEN_BYTES,
    }
    assert counted(pd.registry).items() >= received.items()
    assert "epd_pd_transfers_in_flight" not in counted(pd.registry)


def test_a_killed_producer_counts(
    make_pd: Callable[..., PrefillSide], encode: EncodeSide, path: str
) -> None:
    pd = make_pd(lease_s=1.0)
    pd.arrive("r", "cat", 300)
    encode.tell("order", "t-r", "cat", pd.address, 300)
    pd.step_until(lambda: pd.granted("t-r"))
    assert counted(pd.registry)["epd_pd_transfers_in_flight"] == 1
    encode.process.kill()
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    pd.prefill.encoded_here("r", "cat")
    pd.finish("r")
    seen = counted(pd.registry)
    assert seen.pop("epd_pd_pool_bytes") == pd.pool_bytes
    assert seen == {
        'epd_pd_transfers_failed_total{cause="timeout"}': 1,
        'epd_pd_items_total{source="local"}': 1,
        "epd_pd_fallbacks_total": 1,
    }
