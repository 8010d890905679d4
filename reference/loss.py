"""From a sum of losses and a count of valid tokens to one number: the only place that divides a loss.

    loss = (sum over every valid token of the step) / (number of valid tokens of the step)

Both are taken over *all* ranks that hold other tokens (dp x cp x ep) and all microbatches. Each rank divides
its own sum by the *global* count, and gradients are then **summed** over ranks and microbatches, never
averaged. So ranks with many valid tokens weigh more, as they do in serial training. Dividing by the local
count and averaging (a mean of means) is right only where every rank and microbatch holds equally many; it is
a common and silent bug.

Bytes sent per rank: 2(p-1)/p x 8 for the count, once a step. Nothing else of this file communicates.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from . import comm
from .comm import Group

IGNORE = -100
"""The target of a token that does not count."""


def valid_count(targets: Tensor) -> Tensor:
    """Return the number of targets that count: int64, scalar."""
    return (targets != IGNORE).sum()


def global_count(targets: Tensor | Iterable[Tensor], group: Group) -> Tensor:
    """Return the divisor of the step's loss: the valid tokens of all microbatches on all ranks.

    Args:
        targets: This rank's targets: one tensor, or one a microbatch.
        group: The ranks that hold other tokens (dp x cp x ep).

    Returns:
        int64, scalar; at least 1, so that a step without any valid token has loss 0 rather than nan.
    """
    parts = [targets] if isinstance(targets, Tensor) else list(targets)
    total = torch.stack([valid_count(part) for part in parts]).sum()
    comm.all_reduce(total, group).wait()
    return total.clamp_(min=1)


def cross_entropy_sum(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the sum (not the mean) of the cross entropy over the valid tokens.

    Args:
        logits: `[..., vocabulary]`, floating; 16-bit logits are raised to float32 first.
        targets: `[...]`, int64; `IGNORE` where a token does not count.
        label_smoothing: Weight of the uniform distribution over the vocabulary (Szegedy et al. 2016, section
            7).

    Returns:
        Scalar, float32 or float64.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=IGNORE,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def scaled(loss_sum: Tensor, count: Tensor, auxiliary: Tensor | None = None, microbatches: int = 1) -> Tensor:
    """Return a rank's and microbatch's share of the step's loss: the shares, and their gradients, are summed.

    Args:
        loss_sum: From `cross_entropy_sum`, scalar.
        count: From `global_count`: the divisor of the whole step, not of this microbatch.
        auxiliary: This rank's share of its microbatch's auxiliary loss (experts); the mean over microbatches counts.
        microbatches: Of the step.
    """
    share = loss_sum / count
    return share if auxiliary is None else share + auxiliary / microbatches


def reported(share: Tensor, group: Group) -> Tensor:
    """Return the step's loss from every rank's share (detached, for printing)."""
    total = share.detach().clone()
    comm.all_reduce(total, group).wait()
    return total
