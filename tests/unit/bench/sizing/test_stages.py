from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.bench.sizing.stages import StageTimes, load_stages
from epd_portable.config.removed import REMOVED
from epd_portable.errors import ConfigError
from tests.unit.bench.sizing.samples import stage_times

LEAST = """
source: by hand
encode: {per_embedding_s: 0.001}
prefill: {base_s: 0.1, per_token_s: 0.001}
decode: {base_s: 0.01, per_sequence_s: 0.01}
"""


def parse_stages(text: str, folder: Path) -> StageTimes:
    file = folder / "times.yaml"
    file.write_text(text)
    return load_stages(file)


def test_a_file_needs_what_a_model_takes_and_has_defaults_for_the_rest(tmp_path: Path) -> None:
    times = parse_stages(LEAST, tmp_path)
    assert times.encode.embeddings(448 * 448) == 256
    assert times.encode.embeddings(449 * 448) == 257
    assert times.encode.seconds(256) == pytest.approx(0.256)
    assert times.engine.max_num_seqs == 256


def test_json_is_read_as_well(tmp_path: Path) -> None:
    assert parse_stages(stage_times().model_dump_json(), tmp_path) == stage_times()


def test_a_transfer_takes_a_fixed_time_and_its_bytes() -> None:
    times = stage_times(transfer={"base_s": 0.5, "byte_s": 0.001, "embedding_bytes": 10})
    assert times.transfer.seconds(100) == pytest.approx(1.5)


def test_every_problem_of_a_file_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    text = LEAST.replace("source: by hand", "sources: x").replace("0.1", "-1")
    with pytest.raises(ConfigError) as caught:
        parse_stages(text, tmp_path)
    message = str(caught.value)
    assert "times.yaml: 3 problems" in message
    assert "source: is missing; say where the times are from" in message
    assert "prefill.base_s (line 4)" in message
    assert "did you mean source?" in message


@pytest.mark.parametrize("key", ["engine.encode_turn_s", "front_end.shares_core", "router"])
def test_a_removed_key_is_refused_with_what_applies_instead(key: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    value = f"{{{name}: 1}}" if name else 1
    with pytest.raises(ConfigError, match=f"{key} .*is gone: {REMOVED[key]}"):
        parse_stages(f"{LEAST}{section}: {value}\n", tmp_path)


@pytest.mark.parametrize("value", [".inf", ".nan", "4000", "fast"])
def test_a_time_that_cannot_be_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill\.base_s"):
        parse_stages(LEAST.replace("0.1", value), tmp_path)
