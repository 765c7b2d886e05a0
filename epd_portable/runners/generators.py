"""Random numbers of requests with a seed, on devices where torch cannot set a generator back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing import Self


class RewindableGenerator(torch.Generator):
    """A generator of the CPU that vLLM can set back, as it does one of an accelerator.

    vLLM draws for every request of a step. Where the step computed only a part of the prompt it
    drops the token and calls ``set_offset(get_offset() - 4)`` (``_bookkeeping_sync`` of the V1
    runner, 0.26 to 0.32). torch has offsets for generators that count what they drew, and raises
    ``RuntimeError`` on the CPU, whose generator does not: that would end the engine.
    """

    _marked: torch.Tensor

    @classmethod
    def continuing(cls, generator: torch.Generator) -> Self:
        """Go on where another generator stands, on its device."""
        made = cls(generator.device)
        made.set_state(generator.get_state())
        made.mark()
        return made

    def mark(self) -> None:
        """Note the state to which `set_offset` goes back."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        """Return 0, from which vLLM counts back."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Go back to the mark, regardless of the offset: numbers drawn since are drawn again."""
        return self.set_state(self._marked)


def mark_generators(runner: Any) -> None:
    """Let vLLM take back what it draws in the step that begins; changes nothing where torch can.

    Args:
        runner: Its batch is that of the step. Generators that vLLM made for new requests are
            replaced where it keeps them: in the batch, and for preempted requests in their state.
    """
    batch = runner.input_batch
    for index, generator in batch.generators.items():
        if isinstance(generator, RewindableGenerator):
            generator.mark()
        elif not _has_offset(generator):
            made = RewindableGenerator.continuing(generator)
            batch.generators[index] = made
            runner.requests[batch.req_ids[index]].generator = made


def _has_offset(generator: torch.Generator) -> bool:
    try:
        generator.get_offset()
    except RuntimeError:
        return False
    return True
