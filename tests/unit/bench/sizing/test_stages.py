from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.bench.mix import Mix, checked_mix, read_keys
from epd_portable.bench.sizing.stages import StageTimes, load_stages
from epd_portable.bench.sizing.workload import draw_requests
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


# -- workloads -------------------------------------------------------------------------------------


def read(text: str) -> Mix:
    return checked_mix("--workload", text, Mix, read_keys("--workload", text, Mix))


def test_a_mix_is_read_as_it_is_shown() -> None:
    mix = read("share=0.3,pictures=1/4,size=448/1024,output=60")
    assert mix == Mix(share=0.3, pictures=(1, 4), size=(448, 1024), output=60)
    assert read(str(mix)) == mix


def test_requests_have_the_rate_and_the_mix_that_was_asked_for() -> None:
    mix = Mix(share=0.25, pictures=(1, 4), size=(448,), text=10, output=5)
    found = draw_requests(mix, stage_times(), rate=4.0, count=20_000, seed=1)
    assert found[-1].arrival_s == pytest.approx(5000, rel=0.03)
    with_pictures = [request for request in found if request.items]
    assert len(with_pictures) / 20_000 == pytest.approx(0.25, rel=0.05)
    assert {len(request.items) for request in with_pictures} == {1, 4}
    assert {(request.text_tokens, request.output_tokens) for request in found} == {(10, 5)}
    assert {item.embeddings for request in with_pictures for item in request.items} == {256}


def test_another_rate_brings_the_same_requests_closer_together() -> None:
    mix = Mix(share=0.5, pictures=(1, 2, 3))
    slow, fast = (draw_requests(mix, stage_times(), rate=r, count=100, seed=7) for r in (1.0, 10.0))
    assert [each.arrival_s for each in slow] == pytest.approx(
        [10 * each.arrival_s for each in fast]
    )
    assert [len(each.items) for each in slow] == [len(each.items) for each in fast]
