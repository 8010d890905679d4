"""The oracle itself: each part against a plainer formula, and llm.c's format against its layout."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from reference.checkpoint import HEADER_BYTES, MAGIC, read_checkpoint, write_checkpoint
from reference.comm import Group
from reference.model import GPT, Attention, Dropout, GPTConfig, MoE, auxiliary_loss, causal_attention, rotate
from tests.reference import ranks

TINY = GPTConfig(vocab_size=13, padded_vocab_size=16, max_positions=9, num_layers=2, num_heads=4, width=16)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_grouped_queries_attend_to_their_own_group() -> None:
    q, k, v = draw(2, 6, 5, 4), draw(2, 2, 5, 4, seed=1), draw(2, 2, 5, 4, seed=2)
    got = causal_attention(q, k, v)
    mask = torch.ones(5, 5).tril().bool()
    for head in range(6):
        scores = (q[:, head] @ k[:, head // 3].mT / 2.0).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(got[:, head], scores.softmax(-1) @ v[:, head // 3])


def test_rotary_scores_depend_on_distance_alone_and_positions_may_differ_by_row() -> None:
    q, k = draw(1, 1, 1, 8), draw(1, 1, 1, 8, seed=1)

    def score(i: int, j: int) -> float:
        return float((rotate(q, torch.tensor([i]), 1e4) * rotate(k, torch.tensor([j]), 1e4)).sum())

    assert score(3, 1) == pytest.approx(score(1003, 1001), rel=1e-10)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-3)
    x = draw(2, 3, 5, 8)
    rows = torch.stack([torch.arange(5), torch.arange(7, 12)])
    together = rotate(x, rows, 1e4)
    for row in range(2):
        torch.testing.assert_close(together[row : row + 1], rotate(x[row : row + 1], rows[row], 1e4))


def test_logits_do_not_depend_on_later_tokens_nor_cover_padding() -> None:
    model = GPT(TINY, dtype=torch.float64)
    tokens = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(0))
    logits, auxiliary = model(tokens)
    assert logits.shape == (2, 9, 13)
    assert float(auxiliary) == 0.0
    changed = tokens.clone()
    changed[:, 6:] = 0
    torch.testing.assert_close(model(changed)[0][:, :6], logits[:, :6])
    assert model.wte.weight.shape == (16, 16)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = GPT(TINY, seed=7)
    torch.manual_seed(2)
    other = GPT(TINY, seed=7)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.wte.weight, GPT(TINY, seed=8).wte.weight)


def experts(**changes: float) -> tuple[MoE, Tensor]:
    config = replace(TINY, num_experts=4, top_k=2, **changes)
    moe = GPT(config, dtype=torch.float64).blocks[0].mlp
    assert isinstance(moe, MoE)
    return moe, draw(2, 10, 16)


def plainly(moe: MoE, x: Tensor) -> Tensor:
    """Token by token in order of their index; an expert that is full takes no more."""
    config, tokens = moe.config, x.flatten(0, 1)
    logits = moe.gate.linear(tokens)
    room = [int(np.ceil(config.capacity_factor * 20 * 2 / 4)) if config.capacity_factor else 20] * 4
    out = torch.zeros_like(tokens)
    for index, token in enumerate(tokens):
        weights, chosen = logits[index].softmax(-1).topk(2)
        for weight, expert in zip(weights / weights.sum(), chosen.tolist(), strict=True):
            if room[expert]:
                room[expert] -= 1
                out[index] += weight * moe.experts[expert](token)
    return out.view_as(x)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0])
def test_experts_take_their_tokens_in_order_up_to_capacity(factor: float) -> None:
    moe, x = experts(capacity_factor=factor)
    got, _ = moe(x)
    torch.testing.assert_close(got, plainly(moe, x))
    if factor == 0.4:
        assert not torch.allclose(got, experts(capacity_factor=0.0)[0](x)[0]), "some tokens must be dropped"


def test_auxiliary_loss_is_that_of_the_papers() -> None:
    moe, x = experts(auxiliary_weight=0.3, z_weight=0.2)
    routing = moe.gate(x.flatten(0, 1))
    share = torch.stack([(routing.experts == e).sum() for e in range(4)]).double() / 40
    mean = routing.logits.softmax(-1).mean(0)
    z = (routing.logits.exp().sum(-1).log() ** 2).mean()
    want = float((0.3 * 4 * share @ mean + 0.2 * z).detach())
    assert float(auxiliary_loss(routing, moe.config).detach()) == pytest.approx(want, rel=1e-12)


def test_the_router_learns_through_its_weights_even_with_one_expert_a_token() -> None:
    def gradient(_: Group) -> float:
        config = replace(TINY, num_experts=4, top_k=1, auxiliary_weight=0.0, z_weight=0.0)
        moe = GPT(config, dtype=torch.float64).blocks[0].mlp
        assert isinstance(moe, MoE)
        moe(draw(1, 8, 16))[0].square().sum().backward()
        assert moe.gate.linear.weight.grad is not None
        return float(moe.gate.linear.weight.grad.abs().max())

    assert ranks.alone(gradient) > 0


def test_dropout_draws_from_its_own_generator_and_keeps_the_mean() -> None:
    dropout = Dropout(0.25)
    dropout.generator = torch.Generator().manual_seed(1)
    x = torch.ones(100_000)
    first = dropout(x)
    dropout.generator.manual_seed(1)
    assert torch.equal(dropout(x), first)
    assert first.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert float(first.mean()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(dropout.eval()(x), x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 18}, "width 18 does not divide by 4 heads"),
        ({"num_kv_heads": 3}, "4 query heads do not divide by 3"),
        ({"positions": "rotary", "width": 12}, "even head size, not 3"),
        ({"padded_vocab_size": 5}, "padded vocabulary 5 is less than 13"),
        ({"num_experts": 2, "top_k": 3}, "top-k 3 needs to lie between 1 and the 2 experts"),
    ],
)
def test_bad_sizes_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoints_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model = GPT(TINY, seed=3, dtype=dtype)
    write_checkpoint(model, tmp_path / "model.bin")
    again = read_checkpoint(tmp_path / "model.bin")
    assert again.config == model.config
    for (name, want), got in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(got, want), name


def test_a_checkpoint_has_the_layout_of_llm_c(tmp_path: Path) -> None:
    model = GPT(TINY, seed=3)
    path = tmp_path / "model.bin"
    write_checkpoint(model, path)
    header = np.fromfile(path, dtype="<i4", count=256)
    assert header[:9].tolist() == [MAGIC, 3, 9, 13, 2, 4, 16, 16, 0]
    numbers = np.fromfile(path, dtype="<f4", offset=HEADER_BYTES)
    # wte (16, 16), wpe (9, 16), ln_1 weight and bias (2, 16) each, then qkv weight (2, 48, 16)
    start = 16 * 16 + 9 * 16 + 2 * (2 * 16) + 48 * 16
    second = model.blocks[1].attention
    assert isinstance(second, Attention)
    assert np.array_equal(numbers[start : start + 48 * 16], second.qkv.weight.detach().numpy().reshape(-1))
    assert np.array_equal(numbers[-16:], model.ln_f.bias.detach().numpy())
    assert len(numbers) == sum(parameter.numel() for parameter in model.parameters())


def test_broken_and_unfit_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    write_checkpoint(GPT(TINY), path)
    data = path.read_bytes()
    for broken, message in (
        (data[:-4], "its header asks for"),
        (b"\1" + data[1:], "no llm.c checkpoint"),
        (b"", "magic 0"),
    ):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=message):
            read_checkpoint(path)
    for change in ({"num_experts": 2}, {"positions": "rotary"}, {"num_kv_heads": 2}, {"ffn_width": 8}):
        with pytest.raises(ValueError, match=r"llm.c's GPT-2 format has"):
            write_checkpoint(GPT(replace(TINY, **change)), path)


def test_fused_projection_orders_queries_keys_values() -> None:
    model = GPT(TINY, dtype=torch.float64)
    attention = model.blocks[0].attention
    assert isinstance(attention, Attention)
    x = draw(1, 5, 16)
    q, k, v = F.linear(x, attention.qkv.weight, attention.qkv.bias).split(16, -1)
    heads = [part.view(1, 5, 4, 4).transpose(1, 2) for part in (q, k, v)]
    want = attention.proj(causal_attention(*heads).transpose(1, 2).reshape(1, 5, 16))
    torch.testing.assert_close(attention(x, torch.arange(5)), want)
