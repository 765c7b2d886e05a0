"""Devices and cores are shared out, never in silence."""

from __future__ import annotations

from typing import Any

import pytest

from epd_portable.config.groups import InstanceGroup
from epd_portable.config.roles import Role
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.placement import place_on_cores, place_on_devices


def groups(encode: dict[str, Any], pd: dict[str, Any]) -> dict[Role, InstanceGroup]:
    return {"encode": InstanceGroup(**encode), "prefill-decode": InstanceGroup(**pd)}


TWO = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("encode", "pd", "available", "expected"),
    [
        ({"count": 2}, TWO, ["3", "4", "5", "6", "7"], [["3", "4"], ["5", "6"]]),
        ({}, {"count": 2}, None, [["0"], ["1", "2"]]),
        ({}, {"devices": ["0", "1"], **TWO}, ["0", "1", "2"], [["2"], ["0", "1"]]),
        ({"devices": ["0"]}, {"devices": ["0"]}, ["0"], [["0"], ["0"]]),
    ],
    ids=["one a rank", "nobody counted them", "lists are kept", "listed twice is shared"],
)
def test_ranks_get_devices_of_their_own_or_those_that_are_listed(
    encode: dict[str, Any],
    pd: dict[str, Any],
    available: list[str] | None,
    expected: list[list[str]],
) -> None:
    assert [*place_on_devices(groups(encode, pd), available).values()] == expected


@pytest.mark.parametrize(
    ("pd", "complaint"),
    [
        ({"devices": ["0", "1"]}, "2 devices for count 1 × tensor_parallel_size 1; list 1"),
        ({"devices": ["9"]}, "device 9 is not here; there are 0, 1"),
        ({"devices": ["1", "1"], **TWO}, "one instance needs 2 different devices"),
        (
            {"count": 3, **TWO},
            r"wants 7 devices \(encode 1 × 1 \+ prefill_decode 3 × 2\) and there are 2",
        ),
    ],
)
def test_topology_beyond_the_devices_is_refused(pd: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        place_on_devices(groups({}, pd), ["0", "1"])


@pytest.mark.parametrize(
    ("encode", "pd", "allowed", "cores", "said"),
    [
        ({}, TWO, range(8), [[(0, 1)], [(2, 3), (4, 5)]], []),
        ({}, {}, range(8), [[(0, 1, 2, 3)], [(4, 5, 6, 7)]], []),
        ({"cores": [0]}, {"cores": [2]}, range(4), [[(0,)], [(2,)]], []),
        ({"cores": [7]}, {}, range(8), [[(7,)], [(0, 1, 2, 3, 4, 5, 6)]], []),
        ({}, {}, [4, 6], [[(4,)], [(6,)]], []),
        ({}, {"count": 3}, [4, 6], [], ["4 ranks for 2 CPU cores (4,6)"]),
        ({"cores": [4]}, TWO, [4, 6], [[(4,)], [(6,), (6,)]], ["2 ranks for 1 CPU cores"]),
        ({"cores": [0]}, {"cores": [0, 1]}, [0, 1], None, ["core 0 is in the list of more"]),
        ({"cores": [0, 1]}, {}, [0, 1], None, ["groups without a list share those cores"]),
    ],
)
def test_cores_are_divided_evenly_and_what_is_odd_is_said(
    encode: dict[str, Any],
    pd: dict[str, Any],
    allowed: list[int],
    cores: object,
    said: list[str],
) -> None:
    warnings: list[str] = []
    found = place_on_cores(groups(encode, pd), allowed, warnings)
    assert cores in (None, [*found.values()])
    assert all(each in told for each, told in zip(said, warnings, strict=True))


def test_a_core_that_this_process_may_not_use_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"core 5 is not among .* \(0-3\)"):
        place_on_cores(groups({"cores": [5]}, {}), range(4), [])
