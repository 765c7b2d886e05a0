"""Files of llm-d's: what the types of its current ones do, and what its E/PD guide's chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.choice import ChoiceSection, parse_choice, with_file
from epd_portable.placement.instances import LoadReport
from epd_portable.placement.profiles.policy import Policy
from epd_portable.placement.profiles.selection_types import SelectionRequest
from tests.unit.placement.profiles.situations import Snapshot, asked, having, kept, seen, to_encode


def guide() -> Policy:
    return Policy(with_file(ChoiceSection(file=str(Path(__file__).parent / "files/e-pd.yaml"))))


def pd(
    name: str, tokens: int = 0, cached: int = 0, role: str = "prefill-decode", **more: Any
) -> Snapshot:
    """An instance with so many tokens to prefill, which has the first blocks of the prompt."""
    return having(name, blocks=range(cached), tokens=tokens, role=role, **more)


def prompt(*blocks: int) -> SelectionRequest:
    """A prompt of blocks of so many tokens."""
    ends = [sum(blocks[: index + 1]) for index in range(len(blocks))]
    return asked("decode", blocks=range(len(blocks)), ends=ends, tokens=ends[-1])


def encoder(name: str, waiting: int | None, role: str = "encode", **more: Any) -> Snapshot:
    return seen(name, role=role, reported=LoadReport(items=waiting), **more)


LONG = prompt(*[64] * 100)
PICTURE = prompt(5, 905, 95)
GATE = 567_036
"""Tokens that are prefilled in 36 s, at 15,751 a second."""
FULL = 4_194_304

SITUATIONS: list[tuple[str, SelectionRequest, list[Snapshot], str]] = [
    # decode-filter, then nothing else to decide by.
    ("the only one", LONG, [pd("a", FULL)], "a"),
    ("equals", LONG, [pd("a"), pd("b")], "ab"),
    ("an encoder does not answer", LONG, [pd("e", role="encode"), pd("a", 9)], "a"),
    ("nor does who only prefills", LONG, [pd("p", role="prefill"), pd("a", 9)], "a"),
    ("who decodes does", LONG, [pd("d", role="decode"), pd("a", 9)], "d"),
    ("who does all does", LONG, [pd("x", role="encode-prefill-decode"), pd("a", 9)], "x"),
    # token-load-scorer: tokens in flight, and those of this prompt that are not cached.
    ("fewer in flight", LONG, [pd("a", 500), pd("b", 400), pd("c", 600)], "b"),
    ("one token less", LONG, [pd("a", 1001), pd("b", 1000)], "b"),
    ("requests do not count", LONG, [pd("a", 10, load=9), pd("b", 11)], "a"),
    ("queues do not count", LONG, [encoder("a", 9, "decode"), pd("b", 1)], "a"),
    ("equal sums", LONG, [pd("a", 64, 1), pd("b", 0)], "ab"),
    ("a little cached counts", LONG, [pd("a", 63, 1), pd("b", 0)], "a"),
    ("more in flight than cached", LONG, [pd("a", 65, 1), pd("b", 0)], "b"),
    ("all are full", LONG, [pd("a", FULL + 9), pd("b", 2 * FULL)], "ab"),
    ("one is not", LONG, [pd("a", FULL - 7000), pd("b", 2 * FULL)], "a"),
    # prefix-cache-affinity-filter: from 0.6 of the blocks on.
    ("just below: the load decides", LONG, [pd("a", 4000, 59), pd("b", 0)], "b"),
    ("just below, and less to do", LONG, [pd("a", 3700, 59), pd("b", 0)], "a"),
    ("just there: it stays", LONG, [pd("a", 4000, 60), pd("b", 0)], "a"),
    ("those without it wait, too", LONG, [pd("a", GATE, 100), pd("b", GATE - 7000)], "a"),
    ("two have it: the load", LONG, [pd("a", 900, 99), pd("b", 800, 99), pd("c", 0)], "b"),
    ("two have it: the rest, too", LONG, [pd("a", 500, 100), pd("b", 0, 60), pd("c", 0)], "a"),
    ("all have it", LONG, [pd("a", 2, 80), pd("b", 1, 80)], "b"),
    ("not its beginning", asked(blocks=[7, 8, 9]), [having("a", blocks=[8, 9]), pd("b")], "ab"),
    # Its gate: more than 36 s longer to wait than for the best of the others.
    ("36 s", LONG, [pd("a", GATE, 100), pd("b", 0)], "a"),
    ("more than 36 s", LONG, [pd("a", GATE + 1, 100), pd("b", 0)], "b"),
    ("than the best of them", LONG, [pd("a", GATE + 10, 100), pd("b", 9), pd("c", GATE)], "b"),
    ("the best who has it", LONG, [pd("a", 2 * GATE, 100), pd("c", 99, 99), pd("b", 0)], "c"),
    ("then any of them", LONG, [pd("a", 2 * GATE, 99), pd("b", 90), pd("c", 80)], "c"),
    ("who may still be it", prompt(10, 990_000), [pd("a", GATE + 9, 2), pd("b", 0)], "a"),
    # A picture counts as many tokens as it is estimated to have.
    ("most of it is a picture", PICTURE, [pd("a", 5000, 2), pd("b", 0)], "a"),
    ("and that is not there", PICTURE, [pd("a", 5000, 1), pd("b", 0)], "b"),
    # encode: encode-filter, and the shortest queue.
    ("a shorter queue", to_encode(), [encoder("a", 3), encoder("b", 2), encoder("c", 4)], "b"),
    ("equal queues", to_encode(), [encoder("a", 3), encoder("b", 3)], "ab"),
    ("who encodes beside", to_encode(), [encoder("a", 1), encoder("x", 0, "encode-prefill")], "x"),
    ("who only answers does not", to_encode(), [encoder("a", 9), pd("b")], "a"),
    ("an item it had does not count", to_encode(),
     [encoder("a", 1, cached=having("", items=["p"]).cached), encoder("b", 0)], "b"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("need", "there", "winners"), [pytest.param(*row[1:], id=row[0]) for row in SITUATIONS]
)
def test_the_guides_file_picks_as_llm_d_does(
    need: SelectionRequest, there: list[Snapshot], winners: str
) -> None:
    """Each row follows from what llm-d documents of the types in the file.

    - ``decode-filter`` keeps the roles that decode, ``encode-filter`` those that encode.
    - ``prefix-cache-affinity-filter`` keeps those that have at least ``affinityThreshold`` of the
      prompt's blocks, counted from its beginning, if there are any; all of them, if the least busy
      one of these would take more than ``maxTTFTPenaltyMs`` longer than the least busy one of the
      others, at tokens in flight / ``peakPrefillThroughput``.
    - ``token-load-scorer`` gives 1 - (tokens in flight + tokens of this prompt that are not cached)
      / ``queueThresholdTokens``, at least 0. In flight are tokens of prompts that were not cached,
      until the answer begins.
    - ``queue-scorer`` gives 1 to the shortest queue and 0 to the longest.
    - ``max-score-picker`` takes the highest score; equals share what comes, here by chance.
    """
    found, picked = guide(), set()
    for number in range(24):
        chosen = found.choose(replace(need, key=str(number)), there)
        assert chosen is not None
        picked.add(chosen.name)
    assert picked == set(winners)


# Single types.


def test_affinity_may_be_explored_and_its_gate_left_out() -> None:
    there = [pd("a", 10**9, 100), pd("b")]
    kind = "prefix-cache-affinity-filter"
    assert kept(kind, LONG, there) == "a b"
    assert kept(kind, LONG, there, maxTTFTPenaltyMs=0, peakPrefillThroughput=0) == "a"
    assert kept(kind, LONG, there, maxTTFTPenaltyMs=0, explorationProbability=1) == "a b"
    assert kept(kind, LONG, there, affinityThreshold=0) == "a b"
    assert kept(kind, asked(), there) == "a b"


# What is said.

SCHEDULED = "schedulingProfiles: [{name: decode, plugins: []}]\nplugins:\n"


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("{type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}", "maxNumOfEndpoints has"),
        ("{type: session-affinity-scorer, parameters: {headerName: x}}", "headerName has"),
        ("{type: disagg-profile-handler, parameters: {stageOrder: prefill-first}}",
         "stageOrder has"),
        ("{type: disagg-profile-handler, parameters: {profiles: {fallback: x}}}",
         "profiles.fallback has"),
        ("{type: disagg-profile-handler, parameters: {primaryPort: 8000}}", "primaryPort has"),
        ("{type: inflight-load-producer, parameters: {addEstimatedOutputTokens: true}}",
         "addEstimatedOutputTokens has"),
        ("{type: token-producer, parameters: {modelName: x, estimate: {video: {}}}}",
         "estimate, modelName have"),
        ("{type: token-load-scorer, parameters: {nonTextTokenWeight: 2}}",
         "nonTextTokenWeight has"),
        ("{type: approx-prefix-cache-producer, parameters: {autoTune: true}}", "autoTune has"),
    ],
)  # fmt: skip
def test_a_parameter_without_effect_is_said(plugin: str, said: str) -> None:
    notes = Policy(parse_choice(f"{SCHEDULED}- {plugin}")).notes
    assert any(f"{said} no effect here" in note for note in notes), notes
