"""A mixture of experts spread over ranks is the dense loop over experts: outputs, losses, every gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reference import comm
from reference.comm import ALONE, Group
from reference.expert_parallel.moe import ExpertParallelMoE
from reference.expert_parallel.routing import global_load, within_capacity
from reference.model import GPTConfig, MoE, capacity
from tests.reference import ranks
from tests.reference.equivalence import assert_equal_in_float64

CONFIG = GPTConfig(num_heads=1, width=10, ffn_width=14, num_experts=4, top_k=2, auxiliary_weight=0.5, z_weight=0.2)
TOKENS = 24


def layer(config: GPTConfig, favourite: int | None) -> MoE:
    """Make the serial layer; with a favourite, one expert is chosen by all tokens and the last one by none."""
    torch.manual_seed(3)
    made = MoE(config).double()
    if favourite is not None:
        with torch.no_grad():
            made.gate.linear.weight[favourite] = 0
            made.gate.linear.weight[-1] = 0
            made.gate.linear.weight[favourite, 0] = 50
            made.gate.linear.weight[-1, 0] = -50
    return made


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, gradient = torch.randn(2, 1, TOKENS, 10, dtype=torch.float64, generator=generator)
    x[..., 0] = x[..., 0].abs() + 0.1
    return x, gradient


def results(x: Tensor, out: Tensor, auxiliary: Tensor, moe: torch.nn.Module) -> dict[str, Tensor]:
    found = {"out": out.detach(), "auxiliary": auxiliary.detach(), "x": x.grad}
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
    return found


def dense(_: Group, config: GPTConfig, favourite: int | None) -> dict[str, Tensor]:
    moe = layer(config, favourite)
    x, gradient = inputs()
    out, auxiliary = moe(x.requires_grad_())
    torch.autograd.backward([out, auxiliary], [gradient, torch.ones_like(auxiliary)])
    return results(x, out, auxiliary, moe)


def spread(group: Group, config: GPTConfig, favourite: int | None, interleave: bool) -> dict[str, Tensor]:
    """Run on this rank's tokens: neighbouring ones, or every p-th one."""
    index = torch.arange(TOKENS)
    mine = index[group.rank :: group.size] if interleave else index.tensor_split(group.size)[group.rank]
    moe = ExpertParallelMoE(layer(config, favourite), config, group, group)
    moe.token_index = mine
    x, gradient = (tensor[:, mine] for tensor in inputs())
    out, auxiliary = moe(x.requires_grad_())
    torch.autograd.backward([out, auxiliary], [gradient, torch.ones_like(auxiliary)])
    found = results(x, out, auxiliary, moe)
    comm.all_reduce(found["gate.linear.weight"], group).wait()
    comm.all_reduce(found["auxiliary"], group).wait()
    first = moe.first
    named = {}
    for name, tensor in found.items():
        words = name.split(".")
        if words[0] == "experts":
            words[1] = str(first + int(words[1]))
        named[".".join(words)] = tensor
    return {**named, "index": mine}


def assert_same(parts: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    order = torch.cat([part["index"] for part in parts]).argsort()
    got = {name: torch.cat([part[name] for part in parts], 1)[:, order] for name in ("out", "x")}
    for part in parts:
        got |= {name: tensor for name, tensor in part.items() if name not in {"out", "x", "index"}}
    for kinds in (("out",), ("x",), ("auxiliary",), tuple(name for name in expected if "." in name)):
        assert_equal_in_float64({n: got[n] for n in kinds}, {n: expected[n] for n in kinds}, " ".join(kinds)[:40])


CASES = [
    (replace(CONFIG, capacity_factor=factor, top_k=top_k), favourite)
    for factor in (0.0, 0.75, 1.25)
    for top_k in (1, 2)
    for favourite in (None, 1)  # 1: one expert is chosen by all tokens, and another one by none
]


def all_dense(group: Group) -> list[dict[str, Tensor]]:
    return [dense(group, config, favourite) for config, favourite in CASES]


def all_spread(group: Group, interleave: bool) -> list[dict[str, Tensor]]:
    return [spread(group, config, favourite, interleave) for config, favourite in CASES]


@pytest.mark.parametrize("interleave", [False, True], ids=["neighbours", "interleaved"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_on_ranks_are_a_loop_over_experts(size: int, interleave: bool) -> None:
    expected = ranks.alone(all_dense)
    by_rank = ranks.run(size, all_spread, interleave)
    for number, want in enumerate(expected):
        assert_same([found[number] for found in by_rank], want)


def kept_by_rank(group: Group, experts: Tensor, limit: int, order: Tensor) -> Tensor:
    mine = order.tensor_split(group.size)[group.rank]
    load = global_load(experts[mine], 3, group)
    return within_capacity(experts[mine], mine, load, limit, group)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_who_is_dropped_depends_on_the_place_in_the_microbatch_and_not_on_the_rank(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(11, 3, generator=generator).topk(2).indices
    order = torch.randperm(11, generator=generator)
    kept = torch.empty(11, 2, dtype=torch.bool)
    kept[order] = torch.cat(ranks.run(size, kept_by_rank, experts, 3, order))
    for expert in range(3):
        rows, choices = (experts == expert).nonzero(as_tuple=True)
        assert kept[rows, choices].tolist() == [place < 3 for place in range(len(rows))]


def test_capacity_is_of_the_whole_microbatch() -> None:
    assert capacity(24, replace(CONFIG, capacity_factor=1.25)) == 15
    assert capacity(24, CONFIG) == 24


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 experts do not divide by 3"):
        ExpertParallelMoE(layer(CONFIG, None), CONFIG, Group((0, 1, 2), 0), ALONE)
