"""Configurations: what loads, what is refused and how, and what they choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.choice import ChoiceSection, parse_choice, with_file
from epd_portable.errors import ConfigError
from epd_portable.placement.profiles.catalogue import BUILT_IN, make_plugin
from epd_portable.placement.profiles.policy import Policy
from epd_portable.placement.profiles.selection_types import Decision
from tests.unit.placement.profiles.situations import asked, seen, to_encode

FILES = sorted((Path(__file__).parent / "files").glob("*.yaml"))


def policy(text: str) -> Policy:
    return Policy(parse_choice(text))


def profiles(found: Policy) -> dict[str, str]:
    return {stage: profile.name for stage, profile in found.stages.items()}


def named(name: str) -> Policy:
    (path,) = (path for path in FILES if path.stem == name)
    return Policy(with_file(ChoiceSection(file=str(path))))


def test_each_stage_is_chosen_by_its_profile() -> None:
    found = named("e-p-d")
    assert profiles(found) == {"decode": "decode", "encode": "encode", "prefill": "prefill"}
    assert (found.block_tokens, found.most_blocks) == (64, 64)
    assert (found.cache_sizes.blocks, found.cache_sizes.items) == (1000, 1024)
    assert found.wants_blocks
    assert found.notes == [
        "featureGates has no effect here",
        "dataLayer has no effect here",
        "plug-in token-producer: modelName, vllm have no effect here",
        "plug-in active-request-scorer: requestTimeout has no effect here",
    ]
    everybody = [seen("e", role="encode"), seen("p", role="prefill"), seen("d", role="decode")]
    for need, winner in ((to_encode(), "e"), (asked("prefill"), "p"), (asked("decode"), "d")):
        chosen = found.choose(need, everybody)
        assert chosen is not None and chosen.name == winner


def test_stages_follow_labels_and_profiles_have_free_names() -> None:
    found = named("by-label")
    assert profiles(found) == {"encode": "vision", "decode": "talk"}
    assert (found.block_tokens, found.most_blocks) == (5, 128)
    everybody = [seen("x", labels={"stage": "encode"}), seen("y", labels={"stage": "other"})]
    encoder, decoder = found.choose(to_encode(), everybody), found.choose(asked(), everybody)
    assert (encoder, decoder) == (everybody[0], everybody[1])
    assert found.why_together(to_encode(), None) == ""
    # No decider for prefill, so it is never done apart.
    assert found.why_together(asked("prefill"), None) == "the handler decides so"


def test_the_first_proposal_loads_too() -> None:
    found = named("proposal")
    assert found.encode_timeout_s == 5.0
    assert (
        found.why_together(to_encode(pixels=100 * 100), None) == "multimodal-epd-decider decides so"
    )
    assert found.why_together(to_encode(pixels=300 * 300), None) == ""
    assert any("precise-prefix-cache-scorer" in note for note in found.notes)


PROFILE = "schedulingProfiles: [{name: decode, plugins: [{pluginRef: decode-filter}]}]\n"
DECODE = "plugins: [{type: decode-filter}]\n" + PROFILE
BOTH = """
schedulingProfiles:
  - {name: decode, plugins: [{pluginRef: decode-filter}]}
  - {name: encode, plugins: [{pluginRef: encode-filter}]}
"""


@pytest.mark.parametrize(
    ("handler", "encode_apart"),
    [
        ("", True),
        ("- type: single-profile-handler", False),
        ("- type: disagg-profile-handler", False),
        (
            "- {type: disagg-profile-handler, "
            "parameters: {deciders: {encode: always-disagg-multimodal-decider}}}",
            True,
        ),
        ("- type: epd-profile-handler", True),
    ],
)
def test_handler_decides_encoding_without_a_decider(handler: str, encode_apart: bool) -> None:
    plugins = (
        "plugins:\n- type: decode-filter\n- type: encode-filter\n"
        "- type: always-disagg-multimodal-decider\n"
    )
    found = policy(plugins + handler + BOTH)
    assert (found.why_together(to_encode(), None) == "") is encode_apart
    assert found.why_together(asked("prefill"), None)


def test_a_stage_without_a_profile_is_chosen_for_all_the_same() -> None:
    found = policy(DECODE)
    assert found.why_together(to_encode(), None)
    decision = Decision(stage="encode")
    encoders = [seen("e0", role="encode"), seen("e1", role="encode")]
    assert found.choose(to_encode(), encoders, decision) in encoders
    assert decision.profile == "default"
    assert profiles(policy(DECODE.replace("name: decode", "name: any"))) == {"decode": "any"}
    assert not found.wants_blocks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plugins: []", "give schedulingProfiles"),
        ("plugin: []\n" + PROFILE, "plugin .line 1.: unknown key; did you mean plugins?"),
        ("kind: Pod\n" + DECODE, "kind .line 1.: input should be 'EndpointPickerConfig'"),
        ("apiVersion: v1\n" + DECODE, "apiVersion .line 1.: 'v1' is not known"),
        ("file: a.yaml\nkind: EndpointPickerConfig\n", "and kind are both set"),
        ("file: other.yaml", "names another file"),
        (DECODE.replace("decode-filter}]\n", "decode-filter}, {type: decode-filter}]\n"),
         "'decode-filter'. occur more than once"),
        ("plugins: [{type: a, parameter: {}}]\n" + PROFILE, "did you mean parameters?"),
        ("plugins: [{type: decode-filtre}]\n" + PROFILE,
         "type 'decode-filtre' is not known: did you mean decode-filter"),
        ("plugins: [{type: queue-scorre}, {type: lora-affinity-scorer}]\n" + PROFILE,
         "type 'queue-scorre'(.|\n)*did you mean queue-scorer(.|\n)*type 'lora-affinity-scorer'"),
        ("plugins: [{type: disagg-profile-handlr}]\n" + PROFILE, "disagg-profile-handler"),
        ("plugins: [{type: zzz}]\n" + PROFILE, "known are encode-filter, prefill-filter"),
        (PROFILE, "profile 'decode' names plug-in 'decode-filter', which plugins lack: none"),
        ("plugins: [{type: always-disagg-pd-decider, name: decode-filter}]\n" + PROFILE,
         "is no filter, scorer or picker"),
        ("plugins: [{type: single-profile-handler}, {type: epd-profile-handler}, "
         "{type: decode-filter}]\n" + PROFILE, "2 profile handlers"),
        ("plugins: [{type: decode-filter}, {type: disagg-profile-handler, "
         "parameters: {profiles: {decode: talk}}}]\n" + PROFILE, "names profile 'talk' for decode"),
        ("plugins: [{type: decode-filter}, {type: disagg-profile-handler, "
         "parameters: {deciders: {encode: decode-filter}}}]\n" + PROFILE, "is no decider"),
        ("plugins: [{type: decode-filter}, {type: always-disagg-pd-decider}, "
         "{type: disagg-profile-handler, parameters: {deciders: {encode: "
         "always-disagg-pd-decider}}}]\n" + PROFILE, "decides for encode, which no profile is for"),
        ("plugins: [{type: decode-filter}, {type: random-picker}, {type: max-score-picker}]\n"
         "schedulingProfiles: [{name: decode, plugins: [{pluginRef: random-picker}, "
         "{pluginRef: max-score-picker}]}]", "two pickers"),
        ("plugins: [{type: decode-filter}, {type: encode-filter}]\nschedulingProfiles:\n"
         "- {name: a, plugins: []}\n- {name: b, plugins: []}", "no profile is for decode"),
        ("plugins: [{type: by-label, name: decode-filter, parameters: {labl: x}}]\n" + PROFILE,
         "plug-in 'decode-filter': label: Field required; labl: Extra"),
    ],
)  # fmt: skip
def test_policy_problems_are_reported_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(text)


def test_each_type_makes_a_plugin_and_lists_its_parameters() -> None:
    needed: dict[str, dict[str, Any]] = {"by-label": {"label": "a"}}
    for kind in BUILT_IN:
        assert make_plugin(kind, "mine", needed.get(kind, {})) is not None


def test_prompts_are_compared_where_a_plugin_asks_for_it() -> None:
    for kind, wants in (
        ("prefix-cache-scorer", True),
        ("queue-scorer", False),
        ("kv-cache-utilization-scorer", False),
        ("encode-load-scorer", False),
    ):
        text = f"plugins: [{{type: {kind}, name: decode-filter}}]\n{PROFILE}"
        assert policy(text).wants_blocks is wants
        assert policy(text).wants_loads is not wants
