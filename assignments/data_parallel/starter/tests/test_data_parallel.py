"""Public tests: one step of data-parallel training has the gradients of serial training."""

from contextlib import nullcontext

import pytest
import ranks
import torch
from parallel import loss
from parallel.data_parallel.ddp import DistributedDataParallel
from parallel.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=13, max_positions=6, num_layers=2, num_heads=2, width=8)


def batch(microbatches: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets `[4, microbatches, 1, 6]`: four parts, with 6, 4, 2 and 1 valid tokens a microbatch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(13, (4, microbatches, 1, 6), generator=generator)
    targets = torch.randint(13, (4, microbatches, 1, 6), generator=generator)
    for part, valid in enumerate((6, 4, 2, 1)):
        targets[part, :, :, valid:] = loss.IGNORE
    return tokens, targets


def step(group, tokens, targets, bucket_bytes):
    """One step on this rank's parts of the batch; every rank begins with other weights."""
    mine = slice(group.rank * 4 // group.size, (group.rank + 1) * 4 // group.size)
    tokens, targets = tokens[mine].transpose(0, 1).flatten(1, 2), targets[mine].transpose(0, 1).flatten(1, 2)
    model = GPT(CONFIG, seed=group.rank, dtype=torch.float64)
    if group.size > 1:
        model = DistributedDataParallel(model, group, bucket_bytes=bucket_bytes)
    count = loss.global_count(targets, group)
    for microbatch in range(len(tokens)):
        quiet = group.size > 1 and microbatch < len(tokens) - 1
        with model.no_sync() if quiet else nullcontext():
            logits, _ = model(tokens[microbatch])
            loss.scaled(loss.cross_entropy_sum(logits, targets[microbatch]), count).backward()
    if group.size > 1:
        model.finish()
        model = model.module
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(results, expected):
    """Every rank must hold the serial gradients."""
    for rank, got in enumerate(results):
        for name, gradient in expected.items():
            where = f"rank {rank}, {name}: got {got[name]}, expected {gradient}"
            assert torch.allclose(got[name], gradient, rtol=1e-9, atol=1e-12), where


@pytest.mark.parametrize("bucket_bytes", [1, 2_000, 1 << 20])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_match_serial_when_tokens_are_uneven(world_size, bucket_bytes):
    tokens, targets = batch(microbatches=1)
    (expected,) = ranks.run(1, step, tokens, targets, bucket_bytes)
    compare(ranks.run(world_size, step, tokens, targets, bucket_bytes), expected)


def test_accumulated_gradients_match_serial():
    tokens, targets = batch(microbatches=3)
    (expected,) = ranks.run(1, step, tokens, targets, 2_000)
    compare(ranks.run(2, step, tokens, targets, 2_000), expected)
