"""Random generators of the device, played by generators of the CPU."""

from __future__ import annotations

import torch

_OFFSET_STEP = 4
"""Device offsets count in steps of four."""

_twins: dict[int, torch.Generator] = {}
"""By the address of the device generator: Python sees a new object at every call."""


def cpu_twin(generator: torch.Generator) -> torch.Generator:
    """Return the CPU generator that draws for a device generator.

    It starts from the same seed, again each time the device generator is seeded: a fresh
    seed (and a new generator at an old address) has offset 0, and every draw here moves it on.
    Draws are those that the CPU makes from this seed, not those of a device.
    """
    address = generator._cdata  # type: ignore[attr-defined]
    if generator.get_offset() == 0 or address not in _twins:
        _twins[address] = torch.Generator().manual_seed(generator.initial_seed())
    generator.set_offset(generator.get_offset() + _OFFSET_STEP)
    return _twins[address]
