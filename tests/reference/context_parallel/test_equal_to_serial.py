"""Attention over a split sequence is attention over the whole one: outputs and gradients of q, k and v."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from reference.comm import Group
from reference.context_parallel.block import attend, merge
from reference.context_parallel.layout import Layout, join, positions, split
from reference.context_parallel.ring_attention import _Mask, ring_attention
from reference.context_parallel.ulysses import ulysses_attention
from tests.reference import ranks
from tests.reference.equivalence import assert_equal_in_float64

HEADS, SIZE, BATCH = 12, 8, 2
NAMES = ("query", "key", "value")


def inputs(length: int, kv_heads: int) -> dict[str, Tensor]:
    """Peaked scores: a few keys take all the weight, so that a merge without its maximum overflows."""
    generator = torch.Generator().manual_seed(length * 100 + kv_heads)
    shapes = {"query": HEADS, "key": kv_heads, "value": kv_heads, "gradient": HEADS}
    draw = {n: torch.randn(BATCH, h, length, SIZE, dtype=torch.float64, generator=generator) for n, h in shapes.items()}
    return {name: tensor * (20 if name in {"query", "key"} else 1) for name, tensor in draw.items()}


Case = tuple[int, bool, Layout]


def cases(size: int, function) -> list[Case]:
    """Return key heads, mask and layout; Ulysses needs heads and ranks that divide one another."""
    heads = [kv for kv in (12, 4, 1) if function is ring_attention or not (kv % size and size % kv)]
    return list(product(heads, (True, False), Layout))


def whole(_: Group, length: int, wanted: list[Case]) -> list[dict[str, Tensor]]:
    found = []
    for kv_heads, causal, _layout in wanted:
        given = inputs(length, kv_heads)
        qkv = [given[name].requires_grad_() for name in NAMES]
        out = F.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=True)
        out.backward(given["gradient"])
        found.append({"out": out.detach(), **{name: t.grad for name, t in zip(NAMES, qkv, strict=True)}})
    return found


def parallel(group: Group, function, length: int, wanted: list[Case]) -> list[dict[str, Tensor]]:
    found = []
    for kv_heads, causal, layout in wanted:
        given = {name: split(t, group.rank, group.size, layout, 2) for name, t in inputs(length, kv_heads).items()}
        qkv = [given[name].requires_grad_() for name in NAMES]
        out = function(*qkv, group, causal=causal, layout=layout)
        out.backward(given["gradient"])
        found.append({"out": out.detach(), **{name: t.grad for name, t in zip(NAMES, qkv, strict=True)}})
    return found


@pytest.mark.parametrize("function", [ring_attention, ulysses_attention], ids=["ring", "ulysses"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_split_sequence_gives_the_whole_ones_attention(size: int, function) -> None:
    length, wanted = 2 * size * 3, cases(size, function)
    expected = ranks.alone(whole, length, wanted)
    by_rank = ranks.run(size, parallel, function, length, wanted)
    for number, (kv_heads, causal, layout) in enumerate(wanted):
        for name, want in expected[number].items():
            got = join([found[number][name] for found in by_rank], layout, 2)
            assert_equal_in_float64({name: got}, {name: want}, f"{kv_heads} {causal} {layout}")


def test_a_row_that_saw_no_key_yet_takes_the_block_as_it_is() -> None:
    output, lse = torch.zeros(1, 1, 2, 4, dtype=torch.float64), torch.full((1, 1, 2), -torch.inf, dtype=torch.float64)
    block, block_lse = torch.ones_like(output), torch.tensor([[[3.0, -torch.inf]]], dtype=torch.float64)
    merged, merged_lse = merge(output, lse, block, block_lse)
    assert torch.equal(merged[0, 0, 0], block[0, 0, 0])
    assert torch.equal(merged[0, 0, 1], output[0, 0, 1])  # still nothing, and no nan
    assert merged_lse.tolist() == [[[3.0, -torch.inf]]]


def test_rows_may_lie_in_memory_in_any_way() -> None:
    query, key, value = (torch.randn(1, 2, 8, 4, dtype=torch.float64).mT.contiguous().mT for _ in range(3))
    out, _ = attend(query, key, value, causal=True, scale=0.5)
    expected = F.scaled_dot_product_attention(*(t.contiguous() for t in (query, key, value)), is_causal=True)
    assert_equal_in_float64({"out": out}, {"out": expected}, "attention")


def test_merging_keeps_what_sixteen_bits_would_lose() -> None:
    query, key, value = (
        torch.randn(1, 1, 64, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)
    )
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    output, lse = torch.zeros(1, 1, 64, 16), torch.full((1, 1, 64), -torch.inf)
    for start in range(0, 64, 4):
        part = attend(query, key[:, :, start : start + 4], value[:, :, start : start + 4], causal=False, scale=0.25)
        output, lse = merge(output, lse, *part)
    # Each block is rounded once to bfloat16, whatever the number of blocks: half a unit in the last place of 1.
    assert float((output - exact).abs().max()) <= 2.0**-8 * float(value.abs().max())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_zigzag_gives_every_rank_the_same_number_of_scores(size: int) -> None:
    length = 12

    def scores(rank: int, origin: int) -> int:
        total = 0
        for block in _Mask(True, Layout.ZIGZAG).blocks(rank, origin, length):
            rows, columns = (len(range(length)[part]) for part in (block.queries, block.keys))
            total += rows * (rows + 1) // 2 if block.causal else rows * columns
        return total

    by_rank = [[scores(rank, (rank - step) % size) for step in range(size)] for rank in range(size)]
    assert all(work == by_rank[0] for work in by_rank)
    assert sum(map(sum, by_rank)) == size * length * (size * length + 1) // 2


def test_every_token_lies_on_one_rank_and_parts_join_again() -> None:
    for size, layout in product((1, 2, 3, 4), Layout):
        whole_sequence = torch.arange(24).view(1, 24)
        parts = [split(whole_sequence, rank, size, layout) for rank in range(size)]
        assert torch.equal(join(parts, layout), whole_sequence)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: positions(10, 0, 2, Layout.ZIGZAG), "10 tokens does not divide into the 4 parts"),
        (lambda: positions(9, 0, 2, Layout.CONTIGUOUS), "9 tokens does not divide into the 2 parts"),
        (lambda: attention_of(heads=5, kv_heads=2, length=4), "5 query heads do not divide by 2"),
        (lambda: attention_of(heads=4, kv_heads=2, length=3), "has 3 tokens"),
    ],
)
def test_what_does_not_divide_is_refused_with_its_numbers(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def attention_of(heads: int, kv_heads: int, length: int) -> Tensor:
    key = torch.ones(1, kv_heads, length, 4)
    return ring_attention(torch.ones(1, heads, length, 4), key, key, Group((0, 1), 0))
