"""Keys that are gone are refused by name; the file has few of them."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from epd_portable.config.choice import ChoiceSection
from epd_portable.config.groups import Instances
from epd_portable.config.load import parse_topology
from epd_portable.config.problems import section_of
from epd_portable.config.removed import REMOVED
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError

MOST_KEYS = 82
KEYS = [
    name
    for name in REMOVED
    if name not in Topology.model_fields and name.partition(".")[0] in Topology.model_fields
]


def leaves(model: type[BaseModel], at: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is Instances:
            groups = [section_of(each.annotation) for each in Instances.model_fields.values()]
            for group in groups:
                assert group is not None
                found |= leaves(group, "instances.*.")
        elif inner is not None and inner is not ChoiceSection:
            found |= leaves(inner, f"{at}{name}.")
        elif inner is None:
            found.add(at + name)
    return found


def test_the_file_has_few_keys() -> None:
    assert len(leaves(Topology)) <= MOST_KEYS


@pytest.mark.parametrize("key", KEYS)
def test_a_removed_key_is_refused_with_what_applies_instead(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology("model: demo", "cpu", overrides=[f"{key}=1"])
    assert f"{key} (--set {key}=1): is gone: {REMOVED[key]}" in str(caught.value)


@pytest.mark.parametrize("key", REMOVED)
def test_what_applies_instead_is_there(key: str) -> None:
    known = {re.sub(r"^instances\.\*", "instances.encode", each) for each in leaves(Topology)}
    sections = {each.rpartition(".")[0] for each in known}
    named = re.findall(r"\b(?:router|launch|transfer|store|instances)\.[a-z_.]+", REMOVED[key])
    assert set(named) <= known | sections | {"router.choice"}
