"""Samples of encoder outputs, from a worker's cache to the front."""

from __future__ import annotations

from array import array

import msgspec
import pytest
import torch

from epd_portable.items.output_sample import OutputSampler, read_samples, sample_of
from epd_portable.wire.params import SAMPLED_VALUES, CacheNews, PrefillParams, to_params
from tests.unit.builders import place
from tests.unit.items.harness import Pair, spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sample_has_the_norm_and_values_at_equal_distances(dtype: torch.dtype) -> None:
    output = torch.arange(-500, 524, dtype=torch.float32).reshape(16, 64).to(dtype)
    sample = sample_of(output)
    norm, *values = array("f", sample.numbers)
    assert (sample.shape, f"torch.{sample.dtype}") == ((16, 64), str(dtype))
    assert norm == pytest.approx(output.float().norm().item())
    assert len(values) == SAMPLED_VALUES
    assert (values[0], values[-1]) == (output[0, 0], output[-1, -1])
    assert {*values} <= {*output.float().flatten().tolist()}


def test_small_output_is_sampled_whole() -> None:
    sample = sample_of(torch.tensor([[1.0, 2.0], [2.0, 4.0]]))
    assert [*array("f", sample.numbers)] == [5.0, 1.0, 2.0, 2.0, 4.0]


def test_sampler_reports_outputs_that_are_there_once() -> None:
    outputs = {"a": torch.ones(2, 3)}
    sampler = OutputSampler(0)
    sampler.begin_step(["a", "b"], outputs)
    outputs["b"] = torch.zeros(2, 3)  # The step encodes it.
    assert read_samples(sampler.take()) == {name: sample_of(each) for name, each in outputs.items()}
    assert sampler.take() == set()
    sampler.begin_step(["c"], outputs)
    assert sampler.take() == set()


def test_values_that_are_not_finite_arrive() -> None:
    sampler = OutputSampler(0)
    sampler.begin_step(["a"], {"a": torch.tensor([[float("nan"), float("inf")]])})
    (sample,) = read_samples(sampler.take()).values()
    assert [str(each) for each in array("f", sample.numbers)] == ["nan", "nan", "inf"]


def test_other_ranks_report_nothing() -> None:
    sampler = OutputSampler(1)
    sampler.begin_step(["a"], {"a": torch.ones(2, 3)})
    assert sampler.take() == set()


def test_samples_of_a_request_reach_the_front_once(pair: Pair) -> None:
    items = [place(name, spec(2), 4 * n, input_id=n) for n, name in enumerate("ab")]
    pair.pd.prefill.arrived("plain", items, PrefillParams(transfers=()))
    assert pair.pd.prefill.sampled == []
    pair.pd.prefill.arrived("r", items, PrefillParams(transfers=(), sample=True))
    assert sorted(pair.pd.prefill.sampled) == ["a", "b"]
    pair.pd.prefill.note_samples({"a": (sample := sample_of(torch.ones(2, 3)))})
    assert pair.pd.prefill.sampled == ["b"]
    news = pair.pd.prefill.take_news()
    assert news is not None
    assert msgspec.convert(to_params(news), CacheNews).samples == {"a": sample}
    assert pair.pd.prefill.take_news() is None
    pair.pd.prefill.finished("r")
    assert pair.pd.prefill.sampled == []
