"""The oracle: the same step in one process, on everybody's tokens at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assignments.data_parallel.harness import GRADIENT, PARAMETER, Adapted, load, state
from reference import loss
from reference.model import GPT, GPTConfig

# Odd sizes, tied embeddings with padding rows, fewer key and value heads than query heads.
CONFIG: Mapping[str, Any] = {
    "vocab_size": 13,
    "padded_vocab_size": 16,
    "max_positions": 7,
    "num_layers": 2,
    "num_heads": 3,
    "num_kv_heads": 1,
    "width": 9,
    "ffn_width": 11,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training, before it is dealt out to ranks.

    Attributes:
        parameters: By name, float64: what every rank starts from.
        tokens, targets: `[ranks, microbatches, B, S]`, int64.
        adapted: `[ranks, microbatches]`, int64: whether a microbatch uses the adapter.
    """

    parameters: Mapping[str, Tensor]
    tokens: Tensor
    targets: Tensor
    adapted: Tensor

    def shards(self, generator: torch.Generator) -> list[dict[str, Tensor]]:
        """Return each rank's own inputs. Rank 0 alone has the parameters; the others begin with different ones."""
        return [
            {
                "tokens": self.tokens[rank],
                "targets": self.targets[rank],
                "adapted": self.adapted[rank],
                **{
                    PARAMETER + name: tensor if rank == 0 else drawn(tensor.shape, generator)
                    for name, tensor in self.parameters.items()
                },
            }
            for rank in range(len(self.tokens))
        ]

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of serial training; None for a parameter that no token uses."""
        model = new_model()
        load(model, {PARAMETER + name: tensor for name, tensor in self.parameters.items()})
        count = loss.valid_count(self.targets).clamp(min=1)
        for adapted in (False, True):
            chosen = self.adapted.bool() == adapted
            if chosen.any():
                logits = model(self.tokens[chosen].flatten(0, 1), adapted)
                (loss.cross_entropy_sum(logits, self.targets[chosen].flatten(0, 1)) / count).backward()
        after = state(model)
        return {name: after.get(GRADIENT + name) for name in self.parameters}


def new_model() -> Adapted:
    """Return the model that is trained, in float64."""
    config = GPTConfig(**CONFIG)
    return Adapted(GPT(config), config.vocab_size).to(torch.float64)


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return normal numbers, large enough that no activation hides in another's rounding."""
    return torch.randn(shape, generator=generator, dtype=torch.float64) / 3


def draw(ranks: int, microbatches: int, generator: torch.Generator, *, adapted: bool = False) -> Step:
    """Return a step with as uneven token counts as can be: a share of valid tokens of its own for each microbatch.

    Args:
        ranks: How many ranks share the batch.
        microbatches: Of each rank.
        generator: Where everything comes from.
        adapted: Let the ranks but the first use the adapter, each in its first microbatch. Else none does.
    """
    size = (ranks, microbatches, 2, CONFIG["max_positions"])
    tokens = torch.randint(CONFIG["vocab_size"], size, generator=generator)
    targets = torch.randint(CONFIG["vocab_size"], size, generator=generator)
    share = torch.rand((ranks, microbatches, 1, 1), generator=generator)
    targets[torch.rand(size, generator=generator) > share] = loss.IGNORE
    targets[0, 0] = tokens[0, 0]  # at least one microbatch counts in full,
    targets[-1, -1] = loss.IGNORE  # and at least one with a single token
    targets[-1, -1, 0, 3] = tokens[-1, -1, 0, 4]
    uses = torch.zeros(ranks, microbatches, dtype=torch.int64)
    if adapted:
        uses[1:, 0] = 1
    parameters = {name: drawn(parameter.shape, generator) for name, parameter in new_model().named_parameters()}
    return Step(parameters, tokens, targets, uses)
