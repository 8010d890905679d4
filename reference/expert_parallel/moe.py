"""Expert parallelism: each rank holds E / p of the experts, and tokens are sent to them and back by all-to-all.

    gate -> sort choices by expert -> all-to-all (dispatch) -> own experts -> all-to-all (combine) -> weighted sum

How many tokens go where depends on the data, so ranks first tell each other the numbers. With a capacity the numbers
are bounded, and the same on whatever ranks the tokens lie.

Bytes sent per rank: forward 2 and backward 2 all-to-alls of the choices that leave, on average k T h e (p-1)/p each;
    8 E (p-1)/p for the numbers, and what `routing` sends.
Memory: experts / p; tokens of the rank's own experts, k T on average, more where the load is uneven.
Paper: Lepikhin et al. 2020, "GShard", section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import autograd, comm
from ..comm import ALONE, Group
from ..model import GPTConfig, MoE, capacity
from .routing import auxiliary_share, global_load, within_capacity


class ExpertParallelMoE(nn.Module):
    """A mixture of experts spread over `experts_group`.

    Args:
        whole: The serial layer; its gate and this rank's experts are taken over, not copied.
        config: Sizes.
        experts_group: The ranks that hold different experts.
        tokens_group: The ranks that hold the tokens of a microbatch (dp x cp x ep).
        tensor_group: Tensor parallel ranks. They hold the same tokens, and compute the same routing.
        sequence_parallel: The input arrives, and the output leaves, split along the sequence over `tensor_group`.

    Attributes:
        token_index: The places of this rank's tokens in the whole microbatch, int64 `[T]`; None where ranks hold
            neighbouring rows in group order. Needed only for the order in which tokens are dropped.

    Raises:
        ValueError: The experts do not divide by the group's size.
    """

    def __init__(
        self,
        whole: MoE,
        config: GPTConfig,
        experts_group: Group,
        tokens_group: Group,
        *,
        tensor_group: Group = ALONE,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        if config.num_experts % experts_group.size:
            raise ValueError(f"{config.num_experts} experts do not divide by {experts_group.size} expert ranks")
        own = config.num_experts // experts_group.size
        self.config, self.experts_group, self.tokens_group = config, experts_group, tokens_group
        self.tensor_group, self.sequence_parallel = tensor_group, sequence_parallel
        self.gate = whole.gate
        self.first = own * experts_group.rank
        self.experts = nn.ModuleList(list(whole.experts)[self.first : self.first + own])
        self.token_index: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, W]` -> (`[B, S, W]`, this rank's share of the auxiliary loss, scalar)."""
        if self.sequence_parallel:
            # Every tensor parallel rank computes the whole gradient of the tokens: it takes its part, and sums nothing.
            x = autograd.gather(x, self.tensor_group, 1)
        tokens = x.flatten(0, -2)
        routing = self.gate(tokens)
        load = global_load(routing.experts, self.config.num_experts, self.tokens_group)
        chosen = self._within_capacity(routing.experts, load, tokens)
        out = self._through_experts(tokens, chosen, routing.weights.to(x.dtype)).view_as(x)
        if self.sequence_parallel:
            out = autograd.scatter(out, self.tensor_group, 1)
        return out, auxiliary_share(routing, load, self.config)

    def _within_capacity(self, experts: Tensor, load: Tensor, tokens: Tensor) -> Tensor:
        """Return the choices; those that find no room name the expert E, which does not exist."""
        if self.config.capacity_factor == 0:
            return experts
        limit = capacity(int(load.sum()) // self.config.top_k, self.config)
        fits = within_capacity(experts, self._index(tokens), load, limit, self.tokens_group)
        return experts.masked_fill(~fits, self.config.num_experts)

    def _index(self, tokens: Tensor) -> Tensor:
        if self.token_index is not None:
            return self.token_index
        return torch.arange(len(tokens), device=tokens.device) + len(tokens) * self.tokens_group.rank

    def _through_experts(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it: `[T, W]`."""
        num_experts, chosen = self.config.num_experts, experts.flatten()
        leaving = torch.bincount(chosen, minlength=num_experts + 1)[:num_experts]
        order = chosen.argsort(stable=True)[: int(leaving.sum())]
        rows = order // experts.shape[1]
        leaving = leaving.view(self.experts_group.size, -1)
        arriving = torch.empty_like(leaving)
        comm.all_to_all_into(arriving, leaving.contiguous(), self.experts_group).wait()
        sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        visitors = autograd.all_to_all(tokens.index_select(0, rows), self.experts_group, received, sent)
        answers = self._own_experts(visitors, arriving.flatten().tolist())
        returned = autograd.all_to_all(answers, self.experts_group, sent, received)
        scale = weights.flatten()[order]
        return torch.zeros_like(tokens).index_add(0, rows, returned * scale[:, None])

    def _own_experts(self, visitors: Tensor, counts: list[int]) -> Tensor:
        """Apply each own expert to its tokens; they come, and leave, by source rank and then by expert."""
        own = len(self.experts)
        blocks = list(visitors.split(counts))
        for number, expert in enumerate(self.experts):
            places = range(number, len(blocks), own)
            together = expert(torch.cat([blocks[place] for place in places]))
            for place, answer in zip(places, together.split([counts[place] for place in places]), strict=True):
                blocks[place] = answer
        return torch.cat(blocks)
