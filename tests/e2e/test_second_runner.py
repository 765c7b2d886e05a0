"""Both instances on vLLM's second model runner, on the CPU: equal to one process on the first.

Items travel by NIXL, over TCP.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.e2e.conftest import CPU_MODULES, Pair, forking, running
from tests.e2e.equality import FloatSmoke
from tests.e2e.second_runner import ENV, SETTINGS

pytestmark = [
    pytest.mark.needs_nixl,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, reference_url: str) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("second")
    with (
        forking(("tests.e2e.interpreted", *CPU_MODULES), ENV) as popen,
        running(folder, SETTINGS, env=ENV, popen=popen) as split,
    ):
        yield Pair(split=split, reference_url=reference_url)


class TestSecondRunner(FloatSmoke):
    """Items travel by the hooks of the second runner, not by the mixins of the first."""

    def test_instances_have_the_second_runner(self, pair: Pair) -> None:
        loaded = pair.split.events("model.loaded", since_s=0)
        assert {e["instance"]: e["runner"] for e in loaded} == {
            "encode-0": 2,
            "prefill_decode-0": 2,
        }
        [encoder] = [e["parameters"] for e in loaded if e["instance"] == "encode-0"]
        assert (encoder["language_model"], encoder["visual"] > 0) == (0, True)

    def test_items_travel_by_nixl(self, pair: Pair) -> None:
        assert {each["path"] for each in pair.split.events("transfer.begun")} == {"nixl"}
