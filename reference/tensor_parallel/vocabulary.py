"""The vocabulary split over ranks: embedding, and cross entropy that never gathers the logits.

Each rank holds the rows `[first, last)` of the embedding. It looks up the tokens that are its own and adds zeros for
the others; for the loss it has the logits of its own words only, and three numbers a token make the rest: the largest
logit, the sum of exponentials, and the target's logit.

Bytes sent per rank: embedding one all-reduce of b s h e (a reduce-scatter with sequence parallelism); cross entropy
three all-reduces of b s, never b s V. Memory: logits / t.
Paper: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import autograd, comm
from ..comm import Group
from ..loss import IGNORE
from .linear import SEQUENCE


def padded(vocabulary: int, group: Group) -> int:
    """Return the vocabulary rounded up to a multiple of the ranks, so that every rank holds equally many rows."""
    return -(-vocabulary // group.size) * group.size


class VocabularyParallelEmbedding(nn.Module):
    """Rows of the embedding by rank.

    Args:
        vocabulary: Words; padded so that every rank holds equally many rows.
        hidden: Size of an embedding.
        group: The tensor parallel ranks.
        sequence_parallel: The output leaves split along the sequence.
    """

    def __init__(self, vocabulary: int, hidden: int, group: Group, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        own = padded(vocabulary, group) // group.size
        self.vocabulary, self.group, self.sequence_parallel = vocabulary, group, sequence_parallel
        self.first = own * group.rank
        self.weight = nn.Parameter(torch.zeros(own, hidden))

    @torch.no_grad()
    def load_whole(self, weight: Tensor) -> None:
        """Take this rank's rows of the whole `[vocabulary, hidden]`; rows of the padding are zero."""
        rows = weight[self.first : self.first + self.weight.shape[0]]
        self.weight.zero_()[: rows.shape[0]].copy_(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[b, s]` int64 to `[b, s, hidden]`, or `[b, s/t, hidden]` with sequence parallelism.

        Raises:
            ValueError: On the rank that alone holds the vocabulary, for a token outside of it (torch's own error).
        """
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first
        foreign = (local < 0) | (local >= self.weight.shape[0])
        partial = F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill(foreign.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return autograd.reduce_scatter(partial, self.group, SEQUENCE)
        return autograd.reduce(partial, self.group)


def cross_entropy_sum(
    logits: Tensor, targets: Tensor, group: Group, *, vocabulary: int, label_smoothing: float = 0.0
) -> Tensor:
    """Return the sum of the cross entropy over valid tokens, the same on every rank of the group.

    Args:
        logits: `[..., padded vocabulary / t]`, this rank's words.
        targets: `[...]` int64; `IGNORE` where a token does not count.
        group: The tensor parallel ranks.
        vocabulary: Words without padding: padding takes no part, and smoothing spreads over these.
        label_smoothing: Weight of the uniform distribution over the vocabulary (Szegedy et al. 2016, section 7).

    Returns:
        Scalar, float32 or float64.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    first = logits.shape[-1] * group.rank
    real = max(0, min(logits.shape[-1], vocabulary - first))
    return _CrossEntropySum.apply(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), group, first, real, vocabulary, label_smoothing
    )


class _CrossEntropySum(torch.autograd.Function):
    """Keeps the softmax alone; the gradient is softmax - (1 - eps) one-hot - eps / V."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: Group,
        first: int,
        real: int,
        vocabulary: int,
        smoothing: float,
    ) -> Tensor:
        own = logits[:, :real]
        largest = own.amax(-1) if real else logits.new_full((logits.shape[0],), -torch.inf)
        comm.all_reduce(largest, group, "max").wait()
        shifted = own - largest.unsqueeze(-1)
        valid = targets != IGNORE
        local = targets - first
        here = valid & (local >= 0) & (local < real)
        index = local.masked_fill(~here, 0).unsqueeze(-1)
        picked = shifted.gather(-1, index).squeeze(-1).masked_fill(~here, 0) if real else torch.zeros_like(largest)
        exponentials = shifted.exp()
        numbers = torch.stack(
            [exponentials.sum(-1), picked, shifted.sum(-1)] if smoothing else [exponentials.sum(-1), picked]
        )
        comm.all_reduce(numbers, group).wait()
        denominator = numbers[0]
        losses = denominator.log() - numbers[1]
        if smoothing:
            uniform = denominator.log() - numbers[2] / vocabulary
            losses = (1 - smoothing) * losses + smoothing * uniform
        ctx.save_for_backward(exponentials.div_(denominator.unsqueeze(-1)), index, here, valid)
        ctx.smoothing, ctx.vocabulary, ctx.width = smoothing, vocabulary, logits.shape[-1]
        return losses.masked_fill(~valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        softmax, index, here, valid = ctx.saved_tensors
        own = softmax - ctx.smoothing / ctx.vocabulary
        if own.shape[-1]:
            own.scatter_add_(-1, index, here.to(own.dtype).unsqueeze(-1) * (ctx.smoothing - 1))
        own.mul_(valid.to(own.dtype).unsqueeze(-1)).mul_(gradient)
        return F.pad(own, (0, ctx.width - own.shape[-1])), None, None, None, None, None, None
