"""What each stage holds between backward and step, in mixed precision with Adam, is its docstring's formula."""

import gc

import pytest
import torch
from torch import Tensor

from reference.comm import Group
from reference.model import GPTConfig
from tests.reference import ranks
from tests.reference.data_parallel.strategies import STRATEGIES
from tests.reference.training import Problem, adamw, share_of_loss

# Widths divide by 8 ranks, so that no bucket is padded.
CONFIG = GPTConfig(vocab_size=64, max_positions=8, num_layers=3, num_heads=4, num_kv_heads=2, width=64)
PROBLEM = Problem(config=CONFIG, dtype=torch.bfloat16, sequences=8)


def storages() -> dict[int, int]:
    """Return the bytes of every tensor storage alive in this process, by address."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {address: size for address, size in found.items() if size > 8}  # step counts are scalars


def held(group: Group, strategy: str) -> int:
    before = set(storages())
    model = PROBLEM.model()
    parallel = STRATEGIES[strategy](model, group, adamw)
    for step in range(2):  # states are made by the first step
        (batch,) = PROBLEM.share(step, group)
        share_of_loss(model, batch, torch.tensor(50), 1).backward()
        parallel.after_backward(last=True)
        if step == 0:
            parallel.step(None)
    del batch
    return sum(size for address, size in storages().items() if address not in before)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_bytes_held_are_the_formula(strategy: str, p: int) -> None:
    n = sum(parameter.numel() for parameter in PROBLEM.model().parameters())
    formula = {"zero1": 4 * n + 12 * n / p, "zero2": 2 * n + 14 * n / p, "zero3": 16 * n / p}[strategy]
    assert ranks.run(p, held, strategy) == [formula] * p
