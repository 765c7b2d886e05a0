"""KV connector of a topology, and its settings for the instances."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from epd_portable.config.load import parse_topology
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.kv import KV_CONNECTORS, kv_connector
from epd_portable.platforms.traits import TRAITS

SPLIT = "instances: {prefill: {}, decode: {}}"


def topology(*lines: str, platform: Any = "cpu") -> Topology:
    return parse_topology("\n".join(["model: demo", *lines]), platform)


@pytest.mark.parametrize(("prefill", "decode", "fits"), [(2, 1, True), (2, 2, True), (1, 2, False)])
def test_ranks_are_held_against_what_a_connector_brings_together(
    prefill: int, decode: int, fits: bool
) -> None:
    wanted = topology(
        f"instances: {{prefill: {{tensor_parallel_size: {prefill}}}, "
        f"decode: {{tensor_parallel_size: {decode}}}}}"
    )
    assert kv_connector(wanted, TRAITS["cuda"]) is not None
    if fits:
        assert kv_connector(wanted, TRAITS["npu"]) is not None
    else:
        with pytest.raises(ConfigError, match="is 1, and of decode 2"):
            kv_connector(wanted, TRAITS["npu"])


def test_between_hosts_the_network_must_be_trusted() -> None:
    lines = [SPLIT, "secret_file: /tmp/secret", "launch: {host: 10.0.0.1}"]
    with pytest.raises(ConfigError, match=r"neither encrypts .* transfer\.trusted_network"):
        kv_connector(topology(*lines), TRAITS["cpu"])
    assert kv_connector(topology(*lines, "transfer: {trusted_network: true}"), TRAITS["cpu"])


def ports(*taken: int) -> Callable[[], int]:
    numbers = itertools.count(20000)
    return lambda: next(number for number in numbers if number not in taken)


def test_ranks_that_listen_each_get_ports_in_a_row() -> None:
    assert KV_CONNECTORS["mooncake"].ports(3, ports(20001)) == {
        "kv": 20002,
        "kv1": 20003,
        "kv2": 20004,
    }
    assert KV_CONNECTORS["nixl"].ports(3, ports()) == {"kv": 20000}
