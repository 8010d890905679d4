"""What a gate's choices mean on all ranks together: load, the auxiliary loss, and who is dropped at capacity.

A microbatch is spread over the ranks of dp x cp x ep, but an expert sees one microbatch. So the load f_e, the mean
probability P_e and the capacity are of *all* its tokens, and an expert that is full takes the tokens with the lowest
index *in the microbatch*: which rank a token lies on must not decide whether it is dropped.

Bytes sent per rank: 2(p-1)/p x 8 E for the load, a microbatch and layer. Where some expert is over its capacity, and
only then, (p-1) x 4 (k + 1) T for everybody's choices.
Papers: Fedus et al. 2021, "Switch Transformers", section 2.2 (load, auxiliary loss, capacity); Zoph et al. 2022,
"ST-MoE", equation 5 (z-loss).
"""

import torch
from torch import Tensor

from .. import comm
from ..comm import Group
from ..model import GPTConfig, Routing


def global_load(experts: Tensor, num_experts: int, group: Group) -> Tensor:
    """Return how many choices fell on each expert, on all ranks: int64 `[E]`.

    Args:
        experts: This rank's choices, int64 `[T, k]`.
        num_experts: E.
        group: The ranks that hold the microbatch's tokens.
    """
    load = torch.bincount(experts.flatten(), minlength=num_experts)
    comm.all_reduce(load, group).wait()
    return load


def auxiliary_share(routing: Routing, load: Tensor, config: GPTConfig) -> Tensor:
    """Return this rank's share of the microbatch's auxiliary loss: the shares, and their gradients, are summed.

        weight x E sum_e f_e P_e + z-weight x mean(logsumexp(logits)^2)

    f_e is a count without a gradient, so it is enough to know it; P_e and the z-loss are means over all tokens, of
    which this rank adds its part, divided by the number of *all* tokens. Dividing by this rank's tokens and averaging
    would be another loss wherever ranks hold unequal numbers.

    Args:
        routing: Of this rank's tokens.
        load: From `global_load`.
        config: Weights of the two losses.
    """
    tokens = load.sum() / config.top_k
    frequency = load.to(routing.probabilities.dtype) / load.sum()
    balance = config.num_experts * (frequency * routing.probabilities.sum(0)).sum() / tokens
    z = routing.logits.logsumexp(-1).square().sum() / tokens
    return config.auxiliary_weight * balance + config.z_weight * z


def within_capacity(experts: Tensor, index: Tensor, load: Tensor, limit: int, group: Group) -> Tensor:
    """Return which of this rank's choices find room: bool `[T, k]`.

    Args:
        experts: This rank's choices, int64 `[T, k]`; each token's are different.
        index: The tokens' places in the whole microbatch, int64 `[T]`.
        load: From `global_load`.
        limit: Tokens that an expert takes.
        group: The ranks that hold the microbatch's tokens; they may hold unequal numbers.
    """
    if int(load.max()) <= limit:
        return torch.ones_like(experts, dtype=torch.bool)
    rows, start = _everybody(torch.cat([experts, index[:, None]], 1), group)
    choices = rows[:, :-1].flatten()
    places = rows[:, -1:].expand(-1, experts.shape[1]).flatten()
    by_place = places.argsort(stable=True)
    order = by_place[choices[by_place].argsort(stable=True)]
    ahead = torch.arange(len(order), device=order.device) - (load.cumsum(0) - load)[choices[order]]
    fits = torch.empty_like(choices, dtype=torch.bool)
    fits[order] = ahead < limit
    return fits.view(-1, experts.shape[1])[start : start + len(experts)]


def _everybody(mine: Tensor, group: Group) -> tuple[Tensor, int]:
    """Return the rows of all ranks in group order, and where this rank's begin; ranks may have unequal numbers."""
    counts = comm.all_gather(torch.tensor([len(mine)], device=mine.device), group).tolist()
    room = mine.new_zeros(max(counts), mine.shape[1], dtype=torch.int32)
    room[: len(mine)] = mine
    blocks = comm.all_gather(room, group).view(group.size, *room.shape)
    rows = torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])
    return rows.long(), sum(counts[: group.rank])
