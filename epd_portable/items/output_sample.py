"""Some values of encoder outputs, by which a front compares the engines that encode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from epd_portable.wire.params import SAMPLED_VALUES, OutputSample

if TYPE_CHECKING:
    import torch


class OutputSampler:
    """Takes samples in a PD worker, of outputs that arrived and of those that it encoded itself.

    Args:
        rank: Among the workers of the instance; the first reports.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._wanted: Sequence[str] = ()
        self._outputs: Mapping[str, torch.Tensor] = {}

    def begin_step(self, wanted: Sequence[str], outputs: Mapping[str, torch.Tensor]) -> None:
        """Begin a step with tokens, which may compute with every output that is there.

        Args:
            wanted: Items to sample, by ``mm_hash``; those that are not there yet come again.
            outputs: The runner's, by ``mm_hash``; read by `take`.
        """
        self._wanted, self._outputs = wanted, outputs

    def take(self) -> set[str]:
        """Return what `read_samples` reads, at the end of the step; waits for the device."""
        wanted, self._wanted = self._wanted, ()
        return {
            msgspec.json.encode((mm_hash, sample_of(self._outputs[mm_hash]))).decode()
            for mm_hash in wanted
            if mm_hash in self._outputs and not self._rank
        }


def read_samples(taken: Iterable[str]) -> dict[str, OutputSample]:
    """Return samples by ``mm_hash`` from what `OutputSampler.take` returned."""
    return dict(msgspec.json.decode(each, type=tuple[str, OutputSample]) for each in taken)


def sample_of(output: torch.Tensor) -> OutputSample:
    """Return a sample of an encoder output, when the device has computed that.

    Args:
        output: Ready for work that is queued on the current stream.
    """
    import torch

    flat = output.detach().reshape(-1).float()
    count = min(SAMPLED_VALUES, flat.numel())
    places = torch.linspace(0, max(0, flat.numel() - 1), count, dtype=torch.float64).round().long()
    numbers = torch.cat([flat.norm().reshape(1), flat[places.to(flat.device)]])
    return OutputSample(
        shape=tuple(output.shape),
        dtype=str(output.dtype).removeprefix("torch."),
        numbers=numbers.cpu().numpy().astype("<f4").tobytes(),
    )
