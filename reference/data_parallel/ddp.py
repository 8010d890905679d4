"""Distributed data parallel: the same weights everywhere, other tokens, gradients summed while backward still runs.

Algorithm. Parameters are grouped into buckets, the last registered first, because backward reaches them first. A hook
on each parameter fires when its gradient is final; the last one of a bucket starts the bucket's all-reduce in the
background, while backward goes on with earlier layers. Buckets start in the same order on every rank, so a rank whose
hooks fire in another order cannot pair the wrong buckets.

The loss of each rank is already divided by the number of valid tokens *of the whole step* (`loss.py`), so gradients
are summed, never averaged: right for uneven token counts too.

Bytes sent per rank: 2(p-1)/p G, once a step however many microbatches; one call a bucket. With `find_unused` each
    parameter adds one element to its bucket. Construction broadcasts the parameters once.
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


class Bucket:
    """Some parameters whose gradients are views of one flat tensor (`flat`, padded to a multiple of p)."""

    def __init__(self, parameters: list[Parameter], group: Group, with_flags: bool) -> None:
        self.parameters = parameters
        count = sum(parameter.numel() for parameter in parameters)
        flags = len(parameters) if with_flags else 0
        self.flat = parameters[0].new_zeros(padded(count + flags, group))
        self.views = views_of(self.flat, parameters)
        self.flags = self.flat[count : count + flags]
        self.missing = len(parameters)
        self.reduced = False
        self.pending: Pending | None = None


class GradientReducer:
    """Sums gradients over a group during backward. A subclass says how one bucket travels.

    Use, for each step: `no_sync()` around all microbatches but the last, then `finish()`, then read the gradients,
    then set them to None (`optimizer.zero_grad()`).

    Args:
        parameters: In the order of registration.
        group: The ranks that hold the same parameters and other tokens.
        bucket_bytes: See `buckets.plan`.
        find_unused: Allow parameters without gradient on some or all ranks, at the price of one flag each.
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
        self.buckets = [Bucket(members, group, find_unused) for members in plan(parameters, bucket_bytes)]
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
        if parameter.grad is not view:  # the first microbatch: cheaper than zeroing views and adding to them
            view.copy_(parameter.grad)
            parameter.grad = view
            bucket.reduced = False
        elif bucket.pending is not None or bucket.reduced:
            raise RuntimeError(
                "backward added to gradients that are already summed over ranks: call finish() and set gradients to "
                "None (zero_grad) after each step, and wrap all microbatches but the last in no_sync()"
            )
        if self._syncing:
            bucket.missing -= 1
            while self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
                self._launch(self.buckets[self._launched])

    def _launch(self, bucket: Bucket) -> None:
        if self.find_unused:
            used = [float(parameter.grad is not None) for parameter in bucket.parameters]
            bucket.flags.copy_(torch.tensor(used))
        bucket.pending = self.reduce_bucket(bucket)
        self._launched += 1

    def reduce_bucket(self, bucket: Bucket) -> Pending:
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
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
            self._settle(bucket)
        self._launched = 0

    def _fill_gaps(self, bucket: Bucket) -> None:
        unused = [
            view
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
            if parameter.grad is None  # an earlier microbatch's gradient is there and counts
        ]
        if unused and not self.find_unused:
            shapes = ", ".join(str(tuple(view.shape)) for view in unused)
            raise RuntimeError(f"{len(unused)} parameters had no gradient (shapes {shapes}); pass find_unused=True")
        for view in unused:
            view.zero_()

    def _settle(self, bucket: Bucket) -> None:
        """Give every parameter its sum; one that no rank used keeps None, as in serial training."""
        used = bucket.flags.tolist() if self.find_unused else [1.0] * len(bucket.parameters)
        for parameter, view, count in zip(bucket.parameters, bucket.views, used, strict=True):
            parameter.grad = view if count else None
        bucket.missing = len(bucket.parameters)
        bucket.reduced, bucket.pending = True, None


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
