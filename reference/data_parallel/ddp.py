"""Distributed data parallel: the same weights everywhere, other tokens, gradients summed while backward still runs.

Algorithm. Parameters are grouped into buckets, the last registered first, because backward reaches them first. A hook
on each parameter fires when its gradient is final; the last one of a bucket starts the bucket's all-reduce in the
background, while backward goes on with earlier layers. Buckets start in the same order on every rank, so a rank whose
hooks fire in another order cannot pair the wrong buckets.

The loss of each rank is already divided by the number of valid tokens *of the whole step* (`loss.py`), so gradients
are summed, never averaged: right for uneven token counts too.

Bytes sent per rank: 2(p-1)/p G, once a step however many microbatches; one call a bucket. With `find_unused` one
    more call of 4 bytes a parameter. Construction broadcasts the parameters once.
Memory: parameters, gradients and optimizer states in full on every rank (16N bytes in mixed precision with Adam); the
    gradients *are* the buckets.
Bubble: none. Exposed communication is what is left of the last bucket when backward ends.
Paper: Li et al., PyTorch Distributed (VLDB 2020).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .. import comm
from ..comm import Group, Pending
from .buckets import BUCKET_BYTES, broadcast_from_first, padded, plan, views_of

SUMMED_TWICE = (
    "backward added to gradients that are already summed over ranks: call finish() and set gradients to None "
    "(zero_grad) after each step, and wrap all microbatches but the last in no_sync()"
)


class Bucket:
    """Some parameters whose gradients are views of one flat tensor.

    Attributes:
        flat: The gradients side by side, then zeros up to a multiple of p.
        missing: Parameters whose gradient has not come in the backward pass that synchronises.
        reduced: Whether its sum over ranks has been started; then nothing may be added any more.
    """

    def __init__(self, parameters: list[Parameter], group: Group) -> None:
        self.parameters = parameters
        self.count = sum(parameter.numel() for parameter in parameters)
        self.flat = parameters[0].new_zeros(padded(self.count, group))
        self.views = views_of(self.flat, parameters)
        self.missing = set(parameters)
        self.reduced = False
        self.pending: Pending | None = None


class GradientReducer:
    """Sums gradients over a group during backward.

    Use, for each step: `no_sync()` around all microbatches but the last, then `finish()`, then read the gradients,
    then set them to None (`optimizer.zero_grad()`).

    Args:
        parameters: In the order of registration.
        group: The ranks that hold the same parameters and other tokens.
        bucket_bytes: See `buckets.plan`.
        find_unused: Allow parameters without gradient on some or all ranks, for one more small all-reduce.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        group: Group,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        find_unused: bool = False,
    ) -> None:
        self.group = group
        self.find_unused = find_unused
        self.buckets = [Bucket(members, group) for members in plan(parameters, bucket_bytes)]
        self._syncing = True
        self._launched = 0
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, view))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate. Where the forward pass runs does not matter."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _arrived(self, bucket: Bucket, view: Tensor, parameter: Parameter) -> None:
        """A gradient is final for this backward pass: put it in its place; start the bucket that it completes."""
        if parameter.grad is None:
            return  # left for later by a split backward (zero-bubble pipelines); `finish` finds it
        self._place(bucket, view, parameter)
        if self._syncing:
            bucket.missing.discard(parameter)
            while self._launched < len(self.buckets) and not self.buckets[self._launched].missing:
                self._launch(self.buckets[self._launched])

    def _place(self, bucket: Bucket, view: Tensor, parameter: Parameter) -> None:
        """Make the gradient a view of its bucket: later microbatches then add to it there."""
        if parameter.grad is not view:  # the first microbatch; cheaper than zeroing all views and adding to them
            view.copy_(parameter.grad)
            parameter.grad = view
            bucket.reduced = False
        elif bucket.reduced:
            raise RuntimeError(SUMMED_TWICE)

    def _launch(self, bucket: Bucket) -> None:
        bucket.pending = self._reduce(bucket)
        bucket.reduced = True
        self._launched += 1

    def _reduce(self, bucket: Bucket) -> Pending:
        """Start to sum one bucket over the group."""
        return comm.all_reduce(bucket.flat, self.group)

    def finish(self) -> None:
        """Start what backward left out, and wait for everything. Every rank must call it, once a step.

        Raises:
            RuntimeError: A parameter had no gradient in the whole step and `find_unused` is off.
        """
        for bucket in self.buckets[self._launched :]:
            self._fill_gaps(bucket)
            self._launch(bucket)
        unused = self._unused_everywhere() if self.find_unused else []
        for bucket in self.buckets:
            self._settle(bucket)
        for parameter in unused:
            parameter.grad = None  # as in serial training: no weight decay, no momentum
        self._launched = 0

    def _fill_gaps(self, bucket: Bucket) -> None:
        """Place what came without a hook; zeros stand for a parameter that had no gradient in the whole step."""
        self._allow_unused([v for p, v in zip(bucket.parameters, bucket.views, strict=True) if p.grad is None])
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)

    def _allow_unused(self, unused: list[Tensor]) -> None:
        if unused and not self.find_unused:
            shapes = ", ".join(str(tuple(view.shape)) for view in unused)
            raise RuntimeError(f"{len(unused)} parameters had no gradient (shapes {shapes}); pass find_unused=True")

    def _unused_everywhere(self) -> list[Parameter]:
        parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        flags = [parameter.grad is not None for parameter in parameters]
        used = torch.tensor(flags, dtype=torch.int32, device=parameters[0].device)
        comm.all_reduce(used, self.group, "max").wait()
        return [parameter for parameter, flag in zip(parameters, used.tolist(), strict=True) if not flag]

    def _settle(self, bucket: Bucket) -> None:
        """Wait, and give every parameter its sum."""
        if bucket.pending is not None:
            bucket.pending.wait()
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            parameter.grad = view
        bucket.missing.update(bucket.parameters)
        bucket.pending = None


class DistributedDataParallel(nn.Module):
    """A module whose gradients are summed over `group`; see `GradientReducer` for the arguments and the use."""

    def __init__(self, module: nn.Module, group: Group, **options: Any) -> None:
        super().__init__()
        self.module = module
        broadcast_from_first((*module.parameters(), *module.buffers()), group)
        self.reducer = GradientReducer(module.parameters(), group, **options)
        self.no_sync = self.reducer.no_sync
        self.finish = self.reducer.finish

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the module."""
        return self.module(*arguments, **keywords)
