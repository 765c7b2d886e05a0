"""Encode on CPU cores in one environment, prefill and decode on simulated devices in another.

One topology file on one machine. The releases of vLLM differ where ``.venv`` is there.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.asking import ask, assert_equal, picture
from tests.e2e.cases import ASK
from tests.e2e.conftest import ROOT, Pair, every_instance_is_up
from tests.e2e.engines import RESTART_S, config_of, named, wait_until
from tests.e2e.equality import FloatSmoke
from tests.forked import Popen
from tests.npu_sim.e2e.conftest import ON_CPU, simulated

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

OTHER = ROOT / ".venv"
ENVIRONMENT = OTHER if (OTHER / "bin" / "python").exists() else Path(sys.prefix)


@pytest.fixture(scope="module")
def pair(
    npu_fork: Popen, tmp_path_factory: pytest.TempPathFactory, reference_url: str
) -> Iterator[Pair]:
    settings = [
        "instances.encode.platform=cpu",
        f"instances.encode.environment={ENVIRONMENT}",
        *(f'instances.encode.env.{name}="{value}"' for name, value in ON_CPU.items()),
    ]
    folder = tmp_path_factory.mktemp("apart")
    with simulated(folder, settings, popen=npu_fork) as split:
        wait_until(lambda: every_instance_is_up(split), "the encode engine gets items")
        yield Pair(split=split, reference_url=reference_url)


class TestEncodeOnCpu(FloatSmoke):
    """The front and the prefill+decode engine have the platform ``npu``."""

    def test_encode_engine_has_its_own_platform_and_environment(self, pair: Pair) -> None:
        encode, decode = (named(pair.split.pid, each) for each in ("encode-0", "prefill_decode-0"))
        assert (config_of(encode).platform, config_of(decode).platform) == ("cpu", "npu")
        assert encode.cmdline()[0] == str(ENVIRONMENT / "bin" / "python")
        assert decode.cmdline()[0] == sys.executable

    def test_encode_engine_that_is_killed_joins_again(self, pair: Pair) -> None:
        before = named(pair.split.pid, "encode-0")
        before.kill()
        before.wait(RESTART_S)
        content = [picture(60), ASK]
        assert_equal(ask(pair.split.url, content), ask(pair.reference_url, content))
        seeds = itertools.count(61)
        wait_until(
            lambda: ask(pair.split.url, [picture(next(seeds)), ASK]).sources == ["transfer"],
            "it encodes again",
            within_s=RESTART_S,
        )
