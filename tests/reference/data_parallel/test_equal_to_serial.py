"""Each data-parallel strategy computes what serial training computes, at every world size and precision."""

import pytest
import torch

from tests.reference import ranks
from tests.reference.data_parallel.strategies import STRATEGIES, assert_matches, expected, train
from tests.reference.equivalence import assert_within_rounding
from tests.reference.training import Problem, partial_gradients

WORLDS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("microbatches", "optimizer"), [(1, "sgd"), (3, "adamw")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_clipped_steps_match_serial_when_tokens_are_uneven(
    strategy: str, microbatches: int, optimizer: str, world_size: int
) -> None:
    problem = Problem(optimizer=optimizer, microbatches=microbatches, max_norm=0.5)
    want = expected(problem)
    assert max(want.norms) > 0.5, "clipping must matter"
    results = ranks.run(world_size, train, problem, STRATEGIES[strategy])
    for got in results:
        assert_matches(got, want)
        for name, parameter in results[0].parameters.items():
            assert torch.equal(got.parameters[name], parameter), f"{name} differs between ranks"


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_in_low_precision_cost_no_more_than_their_additions(
    strategy: str, dtype: torch.dtype, world_size: int
) -> None:
    problem = Problem(steps=1)
    exact = expected(problem).gradients[0]
    rounded = expected(problem.in_dtype(dtype)).gradients[0]
    partial = ranks.alone(partial_gradients, problem, world_size)
    for got in ranks.run(world_size, train, problem.in_dtype(dtype), STRATEGIES[strategy]):
        assert got.gradients[0].keys() == exact.keys()
        for name, gradient in got.gradients[0].items():
            parts = [gradients[name] for gradients in partial]
            assert_within_rounding(gradient, rounded[name], exact[name], parts, f"gradient of {name}")
