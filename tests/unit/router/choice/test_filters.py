from __future__ import annotations

from typing import Any

import pytest

from epd_portable.errors import ConfigError
from epd_portable.router.choice.catalogue import make_plugin
from epd_portable.router.choice.selection_types import Filter, SelectionRequest, stages
from tests.unit.router.choice.situations import Snapshot, asked, seen, to_encode

ROLES = [
    *("encode", "prefill", "decode", "encode-prefill", "prefill-decode", "encode-prefill-decode"),
    *("all", "both"),
]
BY_ROLE = [seen(role, role=role) for role in ROLES]


def kept(
    kind: str, contenders: list[Snapshot], need: SelectionRequest, **parameters: Any
) -> list[str]:
    one = make_plugin(kind, kind, parameters)
    assert isinstance(one, Filter)
    return [each.name for each in one.keep(need, contenders)]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("encode-filter", ["encode", "encode-prefill", "encode-prefill-decode", "all"]),
        (
            "prefill-filter",
            ["prefill", "encode-prefill", "prefill-decode", "encode-prefill-decode", "all", "both"],
        ),
        ("decode-filter", ["decode", "prefill-decode", "encode-prefill-decode", "all", "both"]),
    ],
)
def test_a_stage_is_for_those_whose_role_has_it(kind: str, names: list[str]) -> None:
    assert kept(kind, BY_ROLE, asked()) == names


@pytest.mark.parametrize(
    ("role", "served"),
    [
        ("epd", "decode encode prefill"),
        ("pd", "decode prefill"),
        ("ep", "encode prefill"),
        ("e", "encode"),
        ("", ""),
        ("encode-", ""),
        ("prefill-dance", ""),
    ],
)
def test_roles_are_stages_or_short_words_for_them(role: str, served: str) -> None:
    assert " ".join(sorted(stages(role))) == served


A, B, NONE = (
    seen("a", labels={"zone": "1", "gpu": "a100"}),
    seen("b", labels={"zone": "2"}),
    seen("none"),
)
IN = {"key": "zone", "operator": "In", "values": ["1", "3"]}


@pytest.mark.parametrize(
    ("kind", "parameters", "names"),
    [
        ("by-label", {"label": "zone", "validValues": ["1"]}, "a"),
        ("by-label", {"label": "zone", "validValues": ["1"], "allowsNoLabel": True}, "a none"),
        ("by-label", {"label": "zone", "allowsNoLabel": True}, "none"),
        ("by-label", {"label": "llm-d.ai/role", "validValues": ["prefill-decode"]}, "a b none"),
        ("by-label", {"label": "llm-d.ai/role", "validValues": ["encode"]}, ""),
        ("label-selector-filter", {}, "a b none"),
        ("label-selector-filter", {"matchLabels": {"zone": "2"}}, "b"),
        ("label-selector-filter", {"matchExpressions": [IN]}, "a"),
        ("label-selector-filter", {"matchExpressions": [{**IN, "operator": "NotIn"}]}, "b none"),
        (
            "label-selector-filter",
            {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]},
            "a",
        ),
        (
            "label-selector-filter",
            {"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]},
            "b none",
        ),
        ("label-selector-filter", {"matchLabels": {"zone": "2"}, "matchExpressions": [IN]}, ""),
    ],
)
def test_labels_say_who_is_kept(kind: str, parameters: dict[str, Any], names: str) -> None:
    assert " ".join(kept(kind, [A, B, NONE], asked(), **parameters)) == names


VISION, AUDIO, BOTH = (
    seen(words, labels={"llm-d.ai/encoder-type": words})
    for words in ("vision", "audio", "audio, video")
)


@pytest.mark.parametrize(
    ("modality", "names"),
    [
        ("image", ["vision", "none"]),
        ("video", ["vision", "audio, video", "none"]),
        ("audio", ["audio", "audio, video", "none"]),
    ],
)
def test_an_item_meets_encoders_of_its_type(modality: Any, names: list[str]) -> None:
    contenders = [VISION, AUDIO, BOTH, NONE]
    assert kept("encoder-type-filter", contenders, to_encode(modality=modality)) == names
    assert len(kept("encoder-type-filter", contenders, asked())) == 4


@pytest.mark.parametrize(
    ("model", "names"), [("m1", "one two none"), ("m2", "two none"), ("", "one two none")]
)
def test_a_model_meets_instances_that_serve_it(model: str, names: str) -> None:
    contenders = [
        seen("one", labels={"llm-d.ai/model": "m1"}),
        seen("two", labels={"llm-d.ai/model": "m1, m2"}),
        NONE,
    ]
    assert " ".join(kept("model-filter", contenders, asked(model=model))) == names


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("by-label", {}, "label: Field required"),
        ("by-label", {"label": "a", "values": []}, "label, validValues, allowsNoLabel"),
        ("encode-filter", {"a": 1}, "its parameters: none"),
        ("label-selector-filter", {"matchExpressions": [{"key": "a", "operator": "Gt"}]}, "'In'"),
    ],
)
def test_wrong_parameters_are_refused_with_those_that_there_are(
    kind: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plugin(kind, "mine", parameters)
