"""What the three ZeRO stages share: a rank's shard of flat parameters, and the optimizer that sees shards alone.

Optimizers such as SGD and AdamW work element by element, so a step on a shard is that part of the step on the whole.
In 16-bit training the optimizer updates a float32 master copy, from which the 16-bit weights are rounded.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import comm
from ..comm import Group
from ..finalize import clip, sum_of_squares

MakeOptimizer = Callable[[list[Parameter]], Optimizer]


class Shard:
    """This rank's part of some flat parameters.

    Attributes:
        own: The part itself, in the parameters' dtype; often a view of the flat tensor.
        master: What the optimizer updates: `own` itself, or a float32 copy where `own` has 16 bits.
        gradient: The sum over ranks and microbatches so far, in `own`'s dtype; None before the first.
    """

    def __init__(self, own: Tensor) -> None:
        self.own = own
        self.master = Parameter(own.float() if own.element_size() == 2 else own)
        self.gradient: Tensor | None = None

    def add_gradient(self, summed: Tensor) -> None:
        """Keep the first microbatch's gradient; add later ones to it. Takes `summed` over without a copy."""
        if self.gradient is None:
            self.gradient = summed
        else:
            self.gradient.add_(summed)

    def publish(self) -> None:
        """Round the master copy into `own`, where they differ."""
        if self.master.dtype != self.own.dtype:
            self.own.copy_(self.master)


class ShardedOptimizer:
    """An optimizer over shards that are disjoint over the group."""

    def __init__(self, shards: Sequence[Shard], group: Group, optimizer: MakeOptimizer) -> None:
        self.shards, self.group = shards, group
        self.inner = optimizer([shard.master for shard in shards])

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all shards that have one."""
        return [shard.gradient for shard in self.shards if shard.gradient is not None]

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient: squares of *reduced* shards, summed over the group.

        Right where the group is the whole mesh; see `finalize.global_norm` for other axes besides.

        Returns:
            float64, scalar, equal on every rank.
        """
        total = sum_of_squares(self.gradients())
        comm.all_reduce(total, self.group).wait()
        return total.sqrt()

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> Tensor:
        """Clip, update the masters, round them into the parameters' shards; gradients are None afterwards.

        Returns:
            The norm before clipping.
        """
        norm = self.norm()
        if max_norm is not None:
            clip(self.gradients(), norm, max_norm)
        self.update()
        return norm

    @torch.no_grad()
    def update(self) -> None:
        """Update the masters without clipping (the caller has clipped), and publish them."""
        for shard in self.shards:
            if shard.gradient is not None:
                shard.master.grad = shard.gradient.to(shard.master.dtype)
        self.inner.step()
        for shard in self.shards:
            shard.publish()
            shard.master.grad = shard.gradient = None
