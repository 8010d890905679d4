"""One training problem for every strategy: a small odd-sized GPT, microbatches with uneven valid tokens, three steps.

Everything is a function of seeds, so each rank makes the whole and takes its share, and the serial oracle takes all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from reference import loss
from reference.comm import ALONE, Group
from reference.model import GPT, GPTConfig

CONFIG = GPTConfig(
    vocab_size=61,
    padded_vocab_size=64,
    max_positions=11,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    width=20,
    ffn_width=36,
)
STEPS = 3

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Momentum and weight decay; unlike Adam it shows a wrong scale of the gradient."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    """Eps is large, or Adam would turn the rounding of gradients that should be zero into whole steps."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.1)


def adamw_small_eps(parameters: Iterable[Tensor]) -> Optimizer:
    """Adam as people use it, under which a wrong scale of the gradient goes unseen."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-12, weight_decay=0.1)


OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "adamw": adamw, "adamw_small_eps": adamw_small_eps}


@dataclass(frozen=True)
class Problem:
    """What is trained on what. `sequences` is that of one microbatch over all ranks; `max_norm` clips where given."""

    config: GPTConfig = CONFIG
    dtype: torch.dtype = torch.float64
    microbatches: int = 1
    sequences: int = 13
    length: int = 7
    optimizer: str = "sgd"
    max_norm: float | None = None
    steps: int = STEPS

    def in_dtype(self, dtype: torch.dtype) -> "Problem":
        """Return the same problem in another dtype (the same weights, rounded)."""
        return replace(self, dtype=dtype)

    def model(self) -> GPT:
        """Return the model before the first step: made in float32, so that every dtype starts from the same."""
        return GPT(self.config, seed=5).to(self.dtype)

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return tokens and targets `[sequences, length]` of each microbatch; later rows have fewer valid tokens."""
        generator = torch.Generator().manual_seed(1000 + step)
        shape = (self.microbatches, self.sequences, self.length + 1)
        text = torch.randint(self.config.vocab_size, shape, generator=generator)
        tokens, targets = text[..., :-1].contiguous(), text[..., 1:].contiguous()
        row = torch.arange(self.sequences)[:, None]
        keep = torch.rand(targets.shape, generator=generator) < 1.0 - 0.9 * row / self.sequences
        targets = torch.where(keep, targets, loss.IGNORE)
        return list(zip(tokens, targets, strict=True))

    def share(self, step: int, group: Group) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's rows of each microbatch; ranks hold unequal numbers of rows where they do not divide."""
        rows = torch.arange(self.sequences).tensor_split(group.size)[group.rank]
        return [(tokens[rows], targets[rows]) for tokens, targets in self.batch(step)]


@dataclass
class Trajectory:
    """What training left: the loss and norm of each step, each step's gradients, the last parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients, by parameter name; a parameter without one is left out."""
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Copy the parameters, by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def share_of_loss(model: Callable[..., Any], batch: tuple[Tensor, Tensor], count: Tensor, microbatches: int) -> Tensor:
    """Return the share of the step's loss that belongs to one microbatch on one rank."""
    tokens, targets = batch
    logits, auxiliary = model(tokens)
    return loss.scaled(loss.cross_entropy_sum(logits, targets), count, auxiliary, microbatches)


def serial(_: Group, problem: Problem) -> Trajectory:
    """Train on one process, as plainly as it can be written: the oracle."""
    model = problem.model()
    optimizer = OPTIMIZERS[problem.optimizer](model.parameters())
    result = Trajectory()
    for step in range(problem.steps):
        batch = problem.batch(step)
        count = loss.global_count([targets for _, targets in batch], ALONE)
        shares = [share_of_loss(model, part, count, problem.microbatches) for part in batch]
        total = torch.stack(shares).sum()
        total.backward()
        result.losses.append(float(total))
        result.gradients.append(gradients_of(model))
        limit = float("inf") if problem.max_norm is None else problem.max_norm
        result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit))
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = parameters_of(model)
    return result


def partial_gradients(_: Group, problem: Problem, world_size: int) -> list[dict[str, Tensor]]:
    """Return what each rank contributes to the first step's gradients (they sum to the serial ones)."""
    model = problem.model()
    count = loss.global_count([targets for _, targets in problem.batch(0)], ALONE)
    results = []
    for rank in range(world_size):
        model.zero_grad()
        for part in problem.share(0, Group(tuple(range(world_size)), rank)):
            share_of_loss(model, part, count, problem.microbatches).backward()
        results.append(gradients_of(model))
    return results


def norms_by_step(norms: Sequence[Tensor]) -> dict[str, Tensor]:
    """Name norms after their step, for comparison."""
    return {f"step {step}": norm for step, norm in enumerate(norms)}
