"""Configuration files: any text is read or refused, at a bounded cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given

from epd_portable.config.load import parse_topology
from epd_portable.config.problems import MAX_FILE_BYTES, MAX_PROBLEMS, read_text
from epd_portable.errors import ConfigError
from tests.property.budget import budget
from tests.property.limited import CONFIGURATIONS
from tests.warm import Nursery

ROOT = Path(__file__).parents[2]
FILES = [path.read_text("utf-8") for path in sorted((ROOT / "configs").rglob("*.yaml"))]
DEADLINE_S = 120.0
SYNTAX = ["", ":", "- ", "&a ", "*a", "!!int ", "{", "[", "\t", "\x00", "|", "? ", "<<: ", "'"]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["demo", "auto", "1GiB", "3 s", "cpu"])
)
names = st.sampled_from(
    ["model", "instances", "encode", "prefill_decode", "count", "front", "transfer", "engine_args"]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=10,
)


@st.composite
def edited(draw: st.DrawFn, texts: list[str]) -> str:
    """Draw one of the texts with a few edits of its characters."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, len(text)))
        end = place + draw(st.integers(0, 6))
        new = draw(st.sampled_from(SYNTAX) | st.text(max_size=4))
        text = text[:place] + new + text[end:]
    return text


@budget(60)
@given(
    text=edited(FILES) | st.text(max_size=60) | values.map(lambda value: yaml.safe_dump(value)),
    override=st.text(max_size=20)
    | st.sampled_from(["model=&a [*a]", "a=!!int x", "a='\\UFFFFFFFF'"]),
)
def test_any_text_is_a_topology_or_a_configuration_error(text: str, override: str) -> None:
    for overrides in ([], [override]):
        try:
            parse_topology(text, "cpu", overrides=overrides)
        except ConfigError:
            continue


@pytest.fixture(scope="module")
def readers() -> Iterator[Nursery]:
    """Yield a parent of children that can read configurations, and have little else in memory."""
    nursery = Nursery("epd_portable.config.load", "resource")
    yield nursery
    nursery.close()


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[pytest.mark.full] if what == "many keys" else [])
        for what in CONFIGURATIONS
    ],
)
def test_a_bomb_is_read_or_refused_in_little_memory(readers: Nursery, what: str) -> None:
    result = readers.run("-m", "tests.property.limited", "160", what, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_report_names_some_problems_and_counts_the_rest() -> None:
    text = "model: demo\n" + "".join(f"key{number}: 1\n" for number in range(80))
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, "cpu")
    lines = str(caught.value).splitlines()
    assert len(lines) == MAX_PROBLEMS + 2
    assert lines[-1].endswith(f"and {80 - MAX_PROBLEMS + int('80' not in lines[0])} more")


def test_a_file_that_is_no_configuration_is_not_read_whole(tmp_path: Path) -> None:
    large = tmp_path / "weights.yaml"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match=f"more than {MAX_FILE_BYTES} bytes"):
        read_text(large)
    large.write_bytes(b"a" * MAX_FILE_BYTES)
    assert len(read_text(large)) == MAX_FILE_BYTES
