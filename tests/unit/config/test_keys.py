"""A topology file has few keys."""

from __future__ import annotations

from pydantic import BaseModel

from epd_portable.config.choice import ChoiceSection
from epd_portable.config.front import FrontSection
from epd_portable.config.groups import Instances
from epd_portable.config.problems import section_of
from epd_portable.config.schema import Topology

MOST_KEYS = 84


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


def test_the_section_of_the_front_has_at_most_twenty_keys() -> None:
    assert len(FrontSection.model_fields) <= 20
