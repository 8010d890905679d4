"""One rank's training loop on a mesh: pipeline step, what is left to reduce, the true global norm, the optimizer.

The order after the pipeline's step is the same for every mesh:

    1. sequence-parallel parameters over tp, tied embeddings over first and last stage (`finalize`)
    2. all other sums: dense parameters over dp x cp x ep, experts over dp x cp (DDP's buckets, or ZeRO's shards)
    3. the norm over every element of the model once, and clipping by it
    4. the optimizer, and with ZeRO the gathering of what it changed

1 before 2, since ZeRO leaves a rank only its shard. Bytes are the sum of what the parts state.
Paper: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import finalize, loss
from ..comm import Group, Groups
from ..context_parallel.layout import Layout as SequenceLayout
from ..context_parallel.layout import split
from ..data_parallel.buckets import BUCKET_BYTES
from ..data_parallel.ddp import Bucket, GradientReducer
from ..data_parallel.shards import Shard
from ..data_parallel.zero1 import Zero1
from ..data_parallel.zero2 import Zero2
from ..finalize import Layout, layout_of
from ..mesh import DENSE, EXPERT
from ..model import GPT
from ..pipeline_parallel.runtime import Pipeline
from ..tensor_parallel.vocabulary import cross_entropy_sum
from .plan import Plan
from .stage import Stage

MakeOptimizer = Callable[[list[Parameter]], Optimizer]
EVERYBODY_WITH_A_SHARE = ("cp", "ep", "pp", "dp")
"""Axes over which the shares of a step's loss are summed; tensor parallel ranks all hold the same share."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step computed, equal on every rank: the loss, and the norm of the gradient before clipping."""

    loss: Tensor
    norm: Tensor


class Trainer:
    """Trains one model on one mesh. Every rank makes one, and calls the same methods in the same order.

    Args:
        whole: The serial model, the same on every rank; its parts are copied.
        plan: The run.
        groups: Made with `extra=[EVERYBODY_WITH_A_SHARE]`.
        optimizer: Makes the optimizer of parameters, or of shards of them. It must work element by element.
        bucket_bytes: See `data_parallel.buckets.plan`.
    """

    def __init__(
        self, whole: GPT, plan: Plan, groups: Groups, optimizer: MakeOptimizer, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.plan, self.groups = plan, groups
        schedule, pipeline_group = plan.make_schedule(), groups.along("pp")
        own = [stage for stage in range(plan.num_stages) if schedule.rank_of(stage) == pipeline_group.rank]
        self.stages = {number: Stage(whole, number, plan, groups) for number in own}
        first, last = self.stages[own[0]], self.stages[own[-1]]
        if first is not last and first.is_first and last.is_last:
            last.wte = first.wte  # both ends of the pipeline lie on this rank, so one weight is tied to itself
        self.parameters = list(dict.fromkeys(p for stage in self.stages.values() for p in stage.parameters()))
        rows, tokens = plan.local_shape
        tokens //= groups.along("tp").size if first.split_sequence else 1
        self.pipeline = Pipeline(
            schedule,
            self.stages,
            pipeline_group,
            shape=(rows, tokens, plan.config.width),
            dtype=whole.wte.weight.dtype,
        )
        self.reducers = self._make_reducers(optimizer, bucket_bytes)
        self.optimizers = [r.optimizer.inner for r in self.reducers if isinstance(r, Zero1)]
        if not plan.zero:
            self.optimizers = [optimizer(self.parameters)]

    def _make_reducers(self, optimizer: MakeOptimizer, bucket_bytes: int) -> list[GradientReducer]:
        """Return a reducer for the dense parameters and one for the experts, where there are any."""
        made = []
        for axes in (DENSE, EXPERT):
            members = [p for p in self.parameters if _data_axes(p) == axes]
            if not members:
                continue
            group = self.groups.along(*axes)
            if self.plan.zero:
                kind = Zero1 if self.plan.zero == 1 else Zero2
                made.append(kind(members, group, optimizer, bucket_bytes=bucket_bytes))
            else:
                made.append(GradientReducer(members, group, bucket_bytes=bucket_bytes))
        return made

    def step(self, batch: Sequence[tuple[Tensor, Tensor]], max_norm: float | None = None) -> StepResult:
        """Train on this rank's share of each microbatch.

        Args:
            batch: Tokens and targets `[b, s]` int64 a microbatch, from `share`.
            max_norm: Clip the gradient to this norm.
        """
        share = self.backward(batch)
        norm = self.norm()
        if max_norm is not None:
            self.clip(norm, max_norm)
        self.update()
        return StepResult(share, norm)

    def backward(self, batch: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute this rank's final gradients; return the step's loss."""
        targets = [part for _, part in batch]
        count = loss.global_count(targets, self.groups.along(*DENSE))
        for stage in self.stages.values():
            stage.auxiliary.zero_()
        with ExitStack() as stack:
            for reducer in self.reducers:
                stack.enter_context(reducer.no_sync())
            total = self.pipeline.step([tokens for tokens, _ in batch], self._loss_of(targets, count))
        finalize.reduce_residuals(self._before_data_parallel())
        for reducer in self.reducers:
            reducer.finish()
        share = total + sum(stage.auxiliary for stage in self.stages.values())
        return loss.reported(torch.as_tensor(share), self.groups.along(*EVERYBODY_WITH_A_SHARE))

    def _loss_of(self, targets: Sequence[Tensor], count: Tensor) -> Callable[[Tensor, int], Tensor]:
        group, vocabulary = self.groups.along("tp"), self.plan.config.vocab_size

        def of(logits: Tensor, microbatch: int) -> Tensor:
            return loss.scaled(cross_entropy_sum(logits, targets[microbatch], group, vocabulary=vocabulary), count)

        return of

    def _before_data_parallel(self) -> list[finalize.Residual]:
        listed = finalize.residuals(self.parameters, self.groups, reduced=DENSE)
        return [residual for residual in listed if not residual.name.startswith("data")]

    def norm(self) -> Tensor:
        """Return the norm of the model's whole gradient: float64, scalar, equal on every rank."""
        return finalize.global_norm(self.gradients(), self.groups)

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale this rank's gradients so that the norm of the whole is at most `max_norm`."""
        finalize.clip([gradient for gradient, _ in self.gradients()], norm, max_norm)

    def gradients(self) -> Iterator[tuple[Tensor, Layout]]:
        """Yield this rank's final gradients, with ZeRO its part of them, and how they lie on the mesh."""
        for reducer in self.reducers:
            if isinstance(reducer, Zero1):
                for bucket in reducer.buckets:
                    yield from _shard_by_parameter(bucket, reducer.shard_of[bucket], reducer.group)
            else:
                for bucket in reducer.buckets:
                    yield from ((p.grad, layout_of(p)) for p in bucket.parameters if p.grad is not None)

    def update(self) -> None:
        """Take the optimizer's step, and forget the gradients."""
        if not self.plan.zero:
            self.optimizers[0].step()
        for reducer in self.reducers:
            if isinstance(reducer, Zero1):
                reducer.optimizer.update()
                reducer.gather()
        for parameter in self.parameters:
            parameter.grad = None


def share(tensor: Tensor, plan: Plan, groups: Groups) -> Tensor:
    """Return this rank's rows and tokens of a microbatch `[sequences, length]`."""
    first = plan.first_row(groups.coordinates)
    mine = tensor[first : first + plan.local_shape[0]]
    context = groups.along("cp")
    if context.size == 1:
        return mine
    return split(mine, context.rank, context.size, SequenceLayout.ZIGZAG)


def _data_axes(parameter: Tensor) -> tuple[str, ...]:
    return tuple(axis for axis in layout_of(parameter).partial if axis != "tp")


def _shard_by_parameter(bucket: Bucket, shard: Shard, group: Group) -> Iterator[tuple[Tensor, Layout]]:
    """Cut a shard of a bucket where parameters meet: one shard may hold parts that lie differently on the mesh."""
    if shard.gradient is None:
        return
    first = shard.gradient.numel() * group.rank
    start = 0
    for parameter in bucket.parameters:
        begin, end = max(start - first, 0), min(start + parameter.numel() - first, shard.gradient.numel())
        if begin < end:
            layout = layout_of(parameter)
            axes = _data_axes(parameter)
            yield shard.gradient[begin:end], Layout(layout.partial, (*layout.sharded, *axes), layout.tied)
        start += parameter.numel()
