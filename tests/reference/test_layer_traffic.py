"""Bytes and calls of tensor, sequence, context, expert and pipeline parallelism are those of their docstrings.

For one case each, what the kernel counted on a private loopback is read too, so that no formula is compared with
itself: headers and acknowledgements make it more than the formula, and never twice as much.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reference.comm import Group
from reference.context_parallel.layout import Layout
from reference.context_parallel.ring_attention import ring_attention
from reference.context_parallel.ulysses import ulysses_attention
from reference.expert_parallel.moe import ExpertParallelMoE
from reference.model import GPTConfig, MoE
from reference.pipeline_parallel.gpipe import gpipe
from reference.pipeline_parallel.interleaved import interleaved_1f1b
from reference.pipeline_parallel.one_forward_one_backward import one_forward_one_backward
from reference.pipeline_parallel.runtime import Pipeline
from reference.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from reference.tensor_parallel.vocabulary import cross_entropy_sum
from tests.reference import ranks
from tests.reference.traffic import Traffic, loopback_bytes

B, S, W, ELEMENT = 2, 48, 24, 8
SIZES = [1, 2, 3, 4]


def feed_forward(group: Group, sequence_parallel: bool) -> None:
    column = ColumnParallelLinear(W, 48, group, sequence_parallel=sequence_parallel).double()
    row = RowParallelLinear(48, W, group, sequence_parallel=sequence_parallel).double()
    for layer in (column, row):
        nn.init.ones_(layer.weight)
        nn.init.ones_(layer.bias)
    length = S // group.size if sequence_parallel else S
    x = torch.ones(B, length, W, dtype=torch.float64, requires_grad=True)
    row(column(x)).sum().backward()


def ring(group: Group) -> None:
    attention(group, ring_attention)


def ulysses(group: Group) -> None:
    attention(group, ulysses_attention)


HEADS, HEAD = 12, 4


def attention(group: Group, function: Callable[..., Tensor]) -> None:
    q, k, v = (torch.ones(B, HEADS, S // group.size, HEAD, dtype=torch.float64, requires_grad=True) for _ in range(3))
    function(q, k, v, group, layout=Layout.CONTIGUOUS).sum().backward()


def cross_entropy(group: Group) -> None:
    logits = torch.ones(B, S, 60 // group.size, dtype=torch.float64, requires_grad=True)
    cross_entropy_sum(logits, torch.zeros(B, S, dtype=torch.long), group, vocabulary=60).backward()


def experts(group: Group) -> None:
    """Every token goes to the experts of the next rank, so all of them leave."""
    config = GPTConfig(num_heads=1, width=W, ffn_width=8, num_experts=2 * group.size, top_k=2)
    whole = MoE(config).double()
    favourites = [2 * ((group.rank + 1) % group.size) + own for own in (0, 1)]
    with torch.no_grad():
        whole.gate.linear.weight.fill_(-1)
        whole.gate.linear.weight[favourites] = 1
    moe = ExpertParallelMoE(whole, config, group, group)
    out, auxiliary = moe(torch.ones(B, S, W, dtype=torch.float64, requires_grad=True))
    (out.sum() + auxiliary).backward()


MICROBATCHES = 12  # divides by every size


def piped(group: Group, kind: str) -> None:
    make = {"gpipe": gpipe, "1f1b": one_forward_one_backward}.get(kind)
    schedule = make(group.size, MICROBATCHES) if make else interleaved_1f1b(group.size, MICROBATCHES, 2)
    own = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == group.rank]
    stages = {stage: nn.Linear(W, W).double() for stage in own}
    pipeline = Pipeline(schedule, stages, group, shape=(B, S, W), dtype=torch.float64)
    inputs = [torch.ones(B, S, W, dtype=torch.float64) for _ in range(MICROBATCHES)]
    pipeline.step(inputs, lambda out, _: F.mse_loss(out, torch.zeros_like(out)))


ACTIVATION = B * S * W * ELEMENT
KV = 2 * B * S * HEADS * HEAD * ELEMENT  # of the whole sequence


def boundaries(rank: int, p: int, chunks: int) -> int:
    """Return how many activations or gradients a rank sends for one microbatch."""
    stages = [stage for stage in range(p * chunks) if stage % p == rank]
    sent = sum((stage < p * chunks - 1) + (stage > 0) for stage in stages)
    return sent if p > 1 else 0


Formula = Callable[[int, int], float]

CASES: dict[str, tuple[Callable[..., None], tuple[object, ...], Formula]] = {
    # One all-reduce forward (row), one backward (column).
    "tensor": (feed_forward, (False,), lambda p, _: 2 * 2 * (p - 1) / p * ACTIVATION),
    # All-gather and reduce-scatter each way, and the column layer's input gathered once more.
    "sequence": (feed_forward, (True,), lambda p, _: 5 * (p - 1) / p * ACTIVATION),
    "vocabulary cross entropy": (cross_entropy, (), lambda p, _: 3 * 2 * (p - 1) / p * B * S * ELEMENT),
    "ring attention": (ring, (), lambda p, _: (2 * (p - 1) + p * (p > 1)) * KV / p),
    # q, k, v and the output, forward and backward.
    "ulysses": (ulysses, (), lambda p, _: 8 * (p - 1) / p * B * S / p * HEADS * HEAD * ELEMENT),
    "experts": (
        experts,
        (),
        lambda p, _: (p > 1) * (4 * 2 * ACTIVATION + 8 * 2 * (p - 1) + 2 * (p - 1) / p * 8 * 2 * p),
    ),
    "gpipe": (piped, ("gpipe",), lambda p, rank: MICROBATCHES * boundaries(rank, p, 1) * ACTIVATION),
    "1f1b": (piped, ("1f1b",), lambda p, rank: MICROBATCHES * boundaries(rank, p, 1) * ACTIVATION),
    "interleaved": (piped, ("interleaved",), lambda p, rank: MICROBATCHES * boundaries(rank, p, 2) * ACTIVATION),
}


def counted(group: Group, case: str) -> float:
    function, arguments, _ = CASES[case]
    with Traffic() as traffic:
        function(group, *arguments)
    return traffic.sent


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_bytes_sent_are_the_formula(case: str, size: int) -> None:
    sent = ranks.run(size, counted, case)
    expected = [CASES[case][2](size, rank) for rank in range(size)]
    assert sent == pytest.approx(expected)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_counts_the_same_bytes(case: str) -> None:
    function, arguments, formula = CASES[case]
    size = 2
    expected = sum(formula(size, rank) for rank in range(size))
    counted_by_kernel = loopback_bytes(size, function, *arguments)
    assert expected <= counted_by_kernel <= 1.3 * expected + 40_000
