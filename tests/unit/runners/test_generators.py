"""On the CPU a request with a seed draws the same numbers, whatever parts its prompt comes in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from epd_portable.runners.first import PDRunnerMixin
from epd_portable.runners.generators import RewindableGenerator


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator) -> list[float]:
    """Draw an odd number of values in each of the ways in which vLLM's samplers do."""
    noise = torch.empty(5).exponential_(generator=generator)
    [seed] = torch.randint(0, 2**31, (1,), generator=generator)
    return [*noise.tolist(), *torch.randn(3, generator=generator).tolist(), int(seed)]


def discard(generator: torch.Generator) -> None:
    """Do as vLLM does when a step computed a part of a prompt."""
    generator.set_offset(generator.get_offset() - 4)


@dataclass
class Batch:
    req_ids: list[str] = field(default_factory=list)
    generators: dict[int, Any] = field(default_factory=dict)


@dataclass
class Request:
    generator: Any = None


class Runner:
    """Makes requests, their generators and the batch as vLLM's runner does."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.input_batch = Batch()

    def _update_states(self, scheduler_output: dict[str, Any]) -> str:
        """Let these requests be in the batch; new ones with the generator that is given."""
        self.input_batch.req_ids = list(scheduler_output)
        self.input_batch.generators.clear()
        for index, (request_id, made) in enumerate(scheduler_output.items()):
            request = self.requests.setdefault(request_id, Request(made))
            if request.generator is not None:
                self.input_batch.generators[index] = request.generator
        return "corrections"


def mixed() -> Any:
    return type("Mixed", (PDRunnerMixin, Runner), {})()


def test_torch_sets_no_generator_of_the_cpu_back() -> None:
    """A failure means that `RewindableGenerator` can be removed."""
    with pytest.raises(RuntimeError, match="does not use offset"):
        discard(seeded(1))


def test_numbers_after_a_mark_are_drawn_again() -> None:
    plain = seeded(1)
    generator = RewindableGenerator.continuing(seeded(1))
    assert draw(generator) == draw(plain)
    generator.mark()
    first = draw(generator)
    discard(generator)
    assert draw(generator) == first == draw(plain)
    assert draw(generator) == draw(plain) != first


def test_a_prompt_in_parts_draws_what_one_in_one_step_does() -> None:
    runner, plain = mixed(), seeded(7)
    batch = runner.input_batch
    assert runner._update_states({"unseeded": None, "a": seeded(7)}) == "corrections"
    for _ in range(3):
        draw(batch.generators[1])
        discard(batch.generators[1])
        runner._update_states({"unseeded": None, "a": None})
    assert list(batch.generators) == [1]
    assert draw(batch.generators[1]) == draw(plain)


def test_a_request_that_was_preempted_goes_on_where_it_was() -> None:
    runner, plain = mixed(), seeded(3)
    batch = runner.input_batch
    runner._update_states({"a": seeded(3), "b": seeded(4)})
    assert draw(batch.generators[0]) == draw(plain)
    runner._update_states({"b": None})
    # Its prompt and its first token are computed anew, in two steps.
    runner._update_states({"b": None, "a": None})
    draw(batch.generators[1])
    discard(batch.generators[1])
    runner._update_states({"b": None, "a": None})
    assert draw(batch.generators[1]) == draw(plain)


def test_a_generator_that_has_an_offset_stays_as_it_is() -> None:
    class Counting:
        def get_offset(self) -> int:
            return 12

    runner, counting = mixed(), Counting()
    for _ in range(2):
        runner._update_states({"a": counting})
    assert runner.input_batch.generators == {0: counting}
    assert runner.requests["a"].generator is counting
