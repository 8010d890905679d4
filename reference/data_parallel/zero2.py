"""ZeRO stage 2: parameters in full; gradients and the optimizer's states in shards.

Algorithm. As stage 1, but a bucket lives only from its first gradient until it is reduced: then this rank keeps its
1/p, and the bucket's memory is returned while backward goes on. With microbatches there are two ways:

* `finish()` after every backward: each microbatch is reduced and *added* to the shard; gradients stay sharded.
* `no_sync()` for all but the last: one reduction, but full gradients in between (stage 1's memory).

Bytes sent per rank: (p-1)/p G x m + (p-1)/p P, with m the reductions a step; 2(p-1)/p x 8 for the norm.
Memory: 2N + 14N/p bytes in mixed precision with Adam, and the buckets in flight (at most `IN_FLIGHT` and the one being
    filled, where gradients come in the order of the buckets); while stepping, 4N/p more for float32 gradients.
Bubble: none; as stage 1.
Paper: Rajbhandari et al., ZeRO (SC 2020), section 5.2.
"""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .. import comm
from ..comm import Pending
from .ddp import Bucket
from .zero1 import Zero1

IN_FLIGHT = 2


class Zero2(Zero1):
    """Sharded gradients and optimizer states; arguments as `Zero1`. `finish()` may be called once a microbatch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_flight: list[Bucket] = []
        self._sums: dict[Bucket, Tensor] = {}
        for bucket in self.buckets:
            _resize(bucket, 0)

    def _place(self, bucket: Bucket, view: Tensor, parameter: Parameter) -> None:
        """Move the gradient into its bucket, which is given memory with the first; autograd's copy is dropped."""
        if self._syncing:  # otherwise autograd keeps adding to it
            if bucket.reduced:
                raise RuntimeError("call finish() after every backward pass, or use no_sync() for all but the last")
            _resize(bucket, bucket.flat.nbytes)
            view.copy_(parameter.grad)
            parameter.grad = None

    def finish(self) -> None:
        """As `GradientReducer.finish`, once a backward pass that synchronises."""
        super().finish()
        for bucket in self.buckets:
            bucket.reduced = False

    def _fill_gaps(self, bucket: Bucket) -> None:
        _resize(bucket, bucket.flat.nbytes)
        missing = [(p, v) for p, v in zip(bucket.parameters, bucket.views, strict=True) if p in bucket.missing]
        self._allow_unused([view for parameter, view in missing if parameter.grad is None])
        for parameter, view in missing:
            if parameter.grad is None:
                view.zero_()
            else:  # from microbatches under `no_sync`
                self._place(bucket, view, parameter)

    def _reduce(self, bucket: Bucket) -> Pending:
        """Start to sum one bucket into a new shard; keep few others on their way."""
        self._in_flight.append(bucket)
        if len(self._in_flight) > IN_FLIGHT:
            self._settle(self._in_flight[0])
        self._sums[bucket] = bucket.flat.new_empty(bucket.flat.numel() // self.group.size)
        return comm.reduce_scatter_into(self._sums[bucket], bucket.flat, self.group)

    def _settle(self, bucket: Bucket) -> None:
        """Wait, add the sum to the shard, and give the bucket's memory back."""
        if bucket.pending is None:
            return  # settled while backward ran
        bucket.pending.wait()
        bucket.pending = None
        bucket.missing.update(bucket.parameters)
        self._in_flight.remove(bucket)
        self.shard_of[bucket].add_gradient(self._sums.pop(bucket))
        _resize(bucket, 0)


def _resize(bucket: Bucket, size: int) -> None:
    storage = bucket.flat.untyped_storage()
    if storage.nbytes() != size:
        storage.resize_(size)
        if size:
            bucket.flat[bucket.count :].zero_()
