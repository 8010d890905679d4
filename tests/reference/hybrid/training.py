"""Trains the common problem on a mesh, and puts the parts together again for comparison with the serial oracle."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reference.comm import Group, Groups
from reference.hybrid.plan import Plan
from reference.hybrid.trainer import EVERYBODY_WITH_A_SHARE, Trainer, share
from reference.model import GPTConfig
from tests.reference.training import OPTIMIZERS, Problem

DENSE = GPTConfig(
    vocab_size=61,
    padded_vocab_size=64,
    max_positions=16,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    width=16,
    ffn_width=24,
)
EXPERTS = replace(
    DENSE,
    positions="rotary",
    num_experts=4,
    expert_every=2,
    capacity_factor=1.0,
    auxiliary_weight=0.5,
    z_weight=0.1,
)
Part = tuple[Tensor, int | None, int]
"""A tensor, the dimension along which it is split, and which part of it this is."""


@dataclass
class Share:
    """What one rank holds after training."""

    losses: list[float] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Part] = field(default_factory=dict)
    parameters: dict[str, Part] = field(default_factory=dict)


def problem_of(plan: Plan, optimizer: str, max_norm: float | None) -> Problem:
    """Return the serial problem that a plan must agree with."""
    return Problem(
        config=plan.config,
        microbatches=plan.microbatches,
        sequences=plan.sequences,
        length=plan.length,
        optimizer=optimizer,
        max_norm=max_norm,
    )


def train(_: Group, plans: Sequence[tuple[Plan, Problem]]) -> list[Share]:
    """Train each plan, one after the other, in one world."""
    groups = Groups(plans[0][0].mesh, extra=[EVERYBODY_WITH_A_SHARE])
    return [_train(plan, problem, groups) for plan, problem in plans]


def _train(plan: Plan, problem: Problem, groups: Groups) -> Share:
    trainer = Trainer(problem.model(), plan, groups, OPTIMIZERS[problem.optimizer], bucket_bytes=16_000)
    found = Share()
    for step in range(problem.steps):
        batch = [(share(tokens, plan, groups), share(targets, plan, groups)) for tokens, targets in problem.batch(step)]
        if step == 0 and not plan.zero:
            found.losses.append(float(trainer.backward(batch)))
            found.norms.append(trainer.norm())
            found.gradients = parts(trainer, groups, gradients=True)
            if problem.max_norm is not None:
                trainer.clip(found.norms[0], problem.max_norm)
            trainer.update()
            continue
        result = trainer.step(batch, problem.max_norm)
        found.losses.append(float(result.loss))
        found.norms.append(result.norm)
    found.parameters = parts(trainer, groups, gradients=False)
    return found


def parts(trainer: Trainer, groups: Groups, *, gradients: bool) -> dict[str, Part]:
    """Return this rank's pieces of the gradients or of the parameters, by the serial model's names."""
    place = groups.coordinates["tp"]
    found = {}
    for stage in trainer.stages.values():
        for name, parameter in stage.named_parameters():
            tensor = parameter.grad if gradients else parameter
            assert tensor is not None
            for piece in stage.cut(name, tensor.detach()):
                found[piece.name] = (piece.tensor.clone(), piece.split, place)
    return found


def joined(by_rank: Sequence[dict[str, Part]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put every rank's pieces together, in the shapes of `like`; what several ranks hold must be the same on all."""
    pieces: dict[str, dict[int, Part]] = {}
    for held in by_rank:
        for name, (tensor, split, place) in held.items():
            others = pieces.setdefault(name, {})
            known = others.setdefault(place if split is not None else 0, (tensor, split, place))
            assert torch.allclose(known[0], tensor, rtol=1e-12, atol=1e-14), f"ranks disagree on {name}"
    whole = {name: _join(list(dict(sorted(found.items())).values())) for name, found in pieces.items()}
    for name in list(like):
        if ".qkv." in name:
            whole[name] = torch.cat([whole.pop(f"{name}.{letter}") for letter in "qkv"])
    return {name: tensor[: like[name].shape[0]] for name, tensor in whole.items()}


def _join(found: Sequence[Part]) -> Tensor:
    tensors, split = [tensor for tensor, _, _ in found], found[0][1]
    return torch.cat(tensors, split) if split is not None else tensors[0]
