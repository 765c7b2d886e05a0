from __future__ import annotations

from dataclasses import replace

import pytest

from epd_portable.bench.servers import free_port
from epd_portable.bench.sizing.measure import Observations, Probe, analyse, fit
from epd_portable.errors import MeasurementError

EMBEDDINGS = (16.0, 64.0, 144.0, 256.0)
SIDES = (112, 224, 336, 448)

# Encode 0.01 + 0.001 × embeddings; preprocessing 0.002 + 1e-7 × pixels; prefill 0.0001 a token; a
# step 0.02 + 0.005 × sequences; HTTP and tokenizer 0.03.
ENCODE = [0.01 + 0.001 * count for count in EMBEDDINGS]
PREPARE = [0.002 + 1e-7 * side**2 for side in SIDES]
PROMPT = [0.0001 * count for count in EMBEDDINGS]
ALONE = tuple(0.05 + sum(parts) for parts in zip(ENCODE, PREPARE, PROMPT, strict=True))

ONE_PROCESS = Observations(
    texts=tuple((tokens, 0.05 + 0.0001 * tokens) for tokens in (20.0, 200.0, 1000.0)),
    streams=tuple((count, 0.02 + 0.005 * count) for count in (1.0, 2.0, 8.0)),
    sides=SIDES,
    embeddings=EMBEDDINGS,
    alone=ALONE,
    stalls=tuple(0.025 + e + p for e, p in zip(ENCODE, PROMPT, strict=True)),
)


def test_a_line_through_points_on_a_line_is_that_line() -> None:
    line = fit("x", "token", [(1.0, 5.0), (2.0, 7.0), (10.0, 23.0)])
    assert (line.base_s, line.slope_s) == (pytest.approx(3.0), pytest.approx(2.0))
    assert line.rms_s == pytest.approx(0.0, abs=1e-9)


def test_a_line_lies_between_points_that_scatter_and_says_how_far_they_do() -> None:
    line = fit("x", "token", [(0.0, 1.0), (0.0, 3.0), (1.0, 4.0), (1.0, 6.0)])
    assert (line.base_s, line.slope_s) == (pytest.approx(2.0), pytest.approx(3.0))
    assert line.rms_s == pytest.approx(1.0)


def test_neither_time_nor_slope_is_below_zero() -> None:
    steep = fit("x", "token", [(1.0, 0.0), (2.0, 2.0)])
    assert (steep.base_s, steep.slope_s) == (0.0, pytest.approx(0.8))
    falling = fit("x", "token", [(1.0, 3.0), (2.0, 1.0)])
    assert (falling.base_s, falling.slope_s) == (pytest.approx(2.0), 0.0)


def test_points_at_one_place_give_no_line() -> None:
    with pytest.raises(ValueError, match="2 points at one place"):
        fit("x", "token", [(1.0, 0.0), (1.0, 2.0)])


def test_the_stages_of_one_process_are_told_apart() -> None:
    times, lines = analyse(ONE_PROCESS, source="test")
    assert times.encode.pixels_per_embedding == 784
    assert times.encode.base_s == pytest.approx(0.01)
    assert times.encode.per_embedding_s == pytest.approx(0.001)
    assert times.prefill.per_token_s == pytest.approx(0.0001)
    assert (times.decode.base_s, times.decode.per_sequence_s) == pytest.approx((0.02, 0.005))
    assert times.front_end.request_s == pytest.approx(0.03)
    assert times.front_end.picture_s == pytest.approx(0.002)
    assert times.front_end.pixel_s == pytest.approx(1e-7)
    assert all(line.rms_s < 1e-9 for line in lines)


def test_a_server_of_which_another_process_encodes_is_refused() -> None:
    topology = replace(ONE_PROCESS, stalls=(0.026,) * 4)
    with pytest.raises(MeasurementError, match="measure plain vLLM in one process"):
        analyse(topology, source="test")


def test_a_server_that_is_not_there_is_named_with_what_to_do() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(MeasurementError, match=f"--measure {url}.*start a server there"):
        Probe(url, repeat=1, report=lambda line: None)
