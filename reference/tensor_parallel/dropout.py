"""Dropout whose random numbers agree where ranks hold the same values, and differ where they do not.

In a tensor-parallel region each rank holds other features, so masks must differ, or features are dropped in lockstep.
Outside, where activations are replicated, masks must be equal, or the replicas drift apart. So there are two
generators a rank, and a region says which one it is. Sends nothing.
Paper: Shoeybi et al. 2019, "Megatron-LM", section 3 (model-parallel random number generation).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Group


@dataclass(frozen=True)
class Generators:
    """Random numbers for dropout.

    Attributes:
        replicated: The same on every rank of the tensor parallel group.
        split: Different on every rank of it.
    """

    replicated: torch.Generator
    split: torch.Generator

    @classmethod
    def seeded(cls, seed: int, group: Group, device: torch.device | str = "cpu") -> "Generators":
        """Seed both; `seed` must be the same on all ranks of `group`, and different for ranks with other tokens."""
        own = torch.Generator(device).manual_seed(seed)
        # 2718 separates the two streams of rank 0, as Megatron does.
        return cls(own, torch.Generator(device).manual_seed(seed + 2718 + group.rank))


def dropout(input: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Zero elements with `probability` and scale the rest by `1 / (1 - probability)`.

    Raises:
        ValueError: `probability` is not in [0, 1).
    """
    if not 0 <= probability < 1:
        raise ValueError(f"a dropout probability of {probability} is not in [0, 1)")
    if probability == 0:
        return input
    keep = torch.rand(input.shape, dtype=torch.float32, device=input.device, generator=generator) >= probability
    return input * keep.to(input.dtype) / (1 - probability)
