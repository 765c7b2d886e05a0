"""Devices and cores are shared out, never in silence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_portable.config.groups import InstanceGroup
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.placement import assign_cores, assign_devices, core_warnings


def groups(encode: dict[str, Any], prefill_decode: dict[str, Any]) -> dict[str, InstanceGroup]:
    return {
        "encode": InstanceGroup(**encode),
        "prefill_decode": InstanceGroup(**prefill_decode),
    }


def test_every_rank_gets_a_device_of_its_own() -> None:
    wish = groups({"count": 2}, {"count": 1, "tensor_parallel_size": 2})
    assert assign_devices(wish, ["3", "4", "5", "6", "7"]) == {
        "encode": [("3",), ("4",)],
        "prefill_decode": [("5", "6")],
    }


def test_more_devices_than_there_are_is_refused_with_the_numbers() -> None:
    wish = groups({"count": 2}, {"count": 3, "tensor_parallel_size": 2})
    with pytest.raises(ConfigError) as caught:
        assign_devices(wish, ["0", "1", "2", "3"])
    assert "wants 8 devices (encode 2 × 1 + prefill_decode 3 × 2) and there are 4" in str(
        caught.value
    )


def test_a_machine_that_nobody_asked_has_enough_devices() -> None:
    result = assign_devices(groups({"count": 1}, {"count": 2}), None)
    assert result == {"encode": [("0",)], "prefill_decode": [("1",), ("2",)]}


def test_a_list_is_kept_and_the_others_get_the_rest() -> None:
    wish = groups({}, {"devices": ["0", "1"], "tensor_parallel_size": 2})
    assert assign_devices(wish, ["0", "1", "2"]) == {
        "encode": [("2",)],
        "prefill_decode": [("0", "1")],
    }


def test_a_device_listed_by_two_groups_is_shared() -> None:
    result = assign_devices(groups({"devices": ["0"]}, {"devices": ["0"]}), ["0"])
    assert result == {"encode": [("0",)], "prefill_decode": [("0",)]}


@pytest.mark.parametrize(
    ("prefill_decode", "complaint"),
    [
        ({"devices": ["0", "1"]}, "2 devices for count 1 × tensor_parallel_size 1; list 1"),
        ({"devices": ["9"]}, "device 9 is not here; there are 0, 1"),
        (
            {"devices": ["1", "1"], "tensor_parallel_size": 2},
            "one instance needs 2 different devices",
        ),
    ],
)
def test_a_list_that_does_not_fit_is_refused(
    prefill_decode: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        assign_devices(groups({}, prefill_decode), ["0", "1"])


def test_cores_are_divided_evenly_and_what_is_over_is_left() -> None:
    result = assign_cores(groups({}, {"tensor_parallel_size": 2}), range(8))
    assert result.cores == {"encode": [((0, 1),)], "prefill_decode": [((2, 3), (4, 5))]}
    assert result.rest == (6, 7)
    assert result.warnings == ()
    assert assign_cores(groups({}, {}), range(8)).rest == ()
    assert assign_cores(groups({"cores": [0]}, {"cores": [2]}), range(4)).rest == (1, 3)


@pytest.mark.parametrize(
    ("ranks", "threads", "quota", "said"),
    [
        ([(0, 1)], 2, None, []),
        ([(0, 1)], 3, None, ["3 threads on 2 CPU cores (0-1)"]),
        ([(1, 2)], 1, None, ["(1-2) are of several memory nodes, 0-1; 2-3"]),
        ([(0,), (1,)], 1, 1.5, ["the time of 1.5 CPU cores, and instances are bound to 2"]),
        ([(0,), (1,)], 1, 2.0, []),
        ([], 8, 0.5, []),
    ],
)
def test_cores_that_are_not_what_they_seem_are_told(
    ranks: list[tuple[int, ...]], threads: int, quota: float | None, said: list[str]
) -> None:
    bound = {"encode-0": (tuple(ranks), threads)}
    warnings = core_warnings(bound, quota_cores=quota, nodes=((0, 1), (2, 3)))
    assert [each in told for each, told in zip(said, warnings, strict=True)] == [True] * len(said)


def test_more_ranks_than_cores_are_bound_to_none_with_a_warning() -> None:
    result = assign_cores(groups({}, {"count": 3}), [4, 6])
    assert result.cores == {"encode": [()], "prefill_decode": [(), (), ()]}
    assert "4 ranks for 2 CPU cores (4,6)" in result.warnings[0]


def test_more_ranks_than_cores_share_them_where_a_list_keeps_the_others() -> None:
    result = assign_cores(groups({"cores": [4]}, {"tensor_parallel_size": 2}), [4, 6])
    assert result.cores == {"encode": [((4,),)], "prefill_decode": [((6,), (6,))]}
    assert "2 ranks for 1 CPU cores (6)" in result.warnings[0]


def test_a_core_list_is_kept_and_the_others_get_the_rest() -> None:
    result = assign_cores(groups({"cores": [7]}, {}), range(8))
    assert result.cores == {"encode": [((7,),)], "prefill_decode": [((0, 1, 2, 3, 4, 5, 6),)]}
    assert result.warnings == ()


def test_core_lists_that_overlap_or_take_everything_are_told() -> None:
    overlap = assign_cores(groups({"cores": [0]}, {"cores": [0, 1]}), range(2))
    assert overlap.warnings == ("core 0 is in the list of more than one group: they share it",)
    everything = assign_cores(groups({"cores": [0, 1]}, {}), range(2))
    assert everything.cores["prefill_decode"] == [((0, 1),)]
    assert "groups without a list share those cores" in everything.warnings[0]


def test_a_core_that_this_process_may_not_use_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"core 5 is not among .* \(0-3\)"):
        assign_cores(groups({"cores": [5]}, {}), range(4))


@given(
    counts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    widths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    cores=st.sets(st.integers(0, 200), min_size=1, max_size=64),
)
def test_every_rank_gets_cores_of_its_own_or_none_is_bound_and_told(
    counts: tuple[int, int], widths: tuple[int, int], cores: set[int]
) -> None:
    wish = groups(
        {"count": counts[0], "tensor_parallel_size": widths[0]},
        {"count": counts[1], "tensor_parallel_size": widths[1]},
    )
    result = assign_cores(wish, sorted(cores))
    assert [len(group) for group in result.cores.values()] == list(counts)
    ranks = [rank for group in result.cores.values() for one in group for rank in one]
    expected = sum(c * w for c, w in zip(counts, widths, strict=True))
    enough = len(cores) >= expected
    assert len(ranks) == (expected if enough else 0)
    used = [core for rank in ranks for core in rank]
    assert all(ranks) and set(used) <= cores and len(used) == len(set(used))
    assert bool(result.warnings) == (not enough)
    assert set(result.rest) == (cores - set(used) if enough else set())
    assert len({len(rank) for rank in ranks}) <= 1
