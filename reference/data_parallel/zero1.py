"""ZeRO stage 1: gradients and parameters in full, the optimizer's states in shards.

Algorithm. An all-reduce is a reduce-scatter and an all-gather, and the optimizer fits between them: gradients are
reduce-scattered bucket by bucket during backward (the hooks of DDP), each rank updates its own 1/p of every bucket,
and the new parameters are all-gathered. Parameters and gradients are views of flat tensors, padded to a multiple of p,
so nothing is packed.

Bytes sent per rank: (p-1)/p G + (p-1)/p P = 2(p-1)/p G, as DDP; 2(p-1)/p x 8 for the norm. With microbatches the same
    (`no_sync` for all but the last). One reduce-scatter and one all-gather a bucket.
Memory: 4N + 12N/p bytes in mixed precision with Adam (16-bit parameters and gradients; float32 master, two moments);
    while stepping, 4N/p more for float32 gradients.
Bubble: none; the all-gather after the step is exposed.
Paper: Rajbhandari et al., ZeRO (SC 2020), section 5.1.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import comm
from ..comm import Group, Pending
from .buckets import BUCKET_BYTES, broadcast_from_first, flatten
from .ddp import Bucket, GradientReducer
from .shards import MakeOptimizer, Shard, ShardedOptimizer


class Zero1(GradientReducer):
    """Sharded optimizer states. Each step: `no_sync()` but for the last microbatch, `finish()`, `step()`.

    Args:
        parameters: In the order of registration. They become views of flat tensors.
        group: The ranks that share the states; they hold other tokens.
        optimizer: Makes the optimizer from this rank's shards. It must work element by element.
        bucket_bytes: See `buckets.plan`.
        find_unused: Allow parameters without gradient; in a shard theirs is zero, so weight decay applies to them.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        group: Group,
        optimizer: MakeOptimizer,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        find_unused: bool = False,
    ) -> None:
        super().__init__(parameters, group, bucket_bytes=bucket_bytes, find_unused=find_unused)
        self.flats = [flatten(bucket.parameters, group) for bucket in self.buckets]
        broadcast_from_first(self.flats, group)
        self.shards = [Shard(self._own_part(flat)) for flat in self.flats]
        self.shard_of = dict(zip(self.buckets, self.shards, strict=True))
        self.optimizer = ShardedOptimizer(self.shards, group, optimizer)

    def _own_part(self, flat: Tensor) -> Tensor:
        return flat.view(self.group.size, -1)[self.group.rank]

    def _reduce(self, bucket: Bucket) -> Pending:
        """Start to sum one bucket; this rank's part of it becomes final, the rest stays a partial sum."""
        if self.shard_of[bucket].gradient is not None:
            raise RuntimeError("a second finish() before step() would lose the first sum: accumulate under no_sync()")
        return comm.reduce_scatter_into(self._own_part(bucket.flat), bucket.flat, self.group)

    def _settle(self, bucket: Bucket) -> None:
        """Hand the reduced part to the shard, and hide the unreduced rest from everyone."""
        super()._settle(bucket)
        self.shard_of[bucket].add_gradient(self._own_part(bucket.flat))
        for parameter in bucket.parameters:
            parameter.grad = None

    def _unused_everywhere(self) -> list[Parameter]:
        return []  # nobody needs to know: shards have no holes

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> Tensor:
        """Clip by the global norm, update this rank's shard, and gather the new parameters from all.

        Returns:
            The global norm before clipping: float64, scalar.
        """
        norm = self.optimizer.step(max_norm)
        self.gather()
        return norm

    def gather(self) -> None:
        """Gather all parameters from the shards."""
        gathers = [
            comm.all_gather_into(flat, shard.own, self.group)
            for flat, shard in zip(self.flats, self.shards, strict=True)
        ]
        for gather in gathers:
            gather.wait()
