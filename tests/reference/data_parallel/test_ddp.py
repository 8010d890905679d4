"""DDP: a step equals serial whatever the buckets, microbatches and unused parameters; its traffic is the formula's."""

from functools import cache

import pytest
import torch
from torch import nn

from reference import loss
from reference.comm import Group
from reference.data_parallel.ddp import DistributedDataParallel
from tests.reference import ranks
from tests.reference.equivalence import assert_equal_in_float64
from tests.reference.training import (
    OPTIMIZERS,
    Problem,
    Trajectory,
    gradients_of,
    norms_by_step,
    parameters_of,
    serial,
    share_of_loss,
)

WORLDS = [1, 2, 3, 4, 8]


@cache
def expected(problem: Problem) -> Trajectory:
    result = ranks.alone(serial, problem)
    assert isinstance(result, Trajectory)
    return result


def train(group: Group, problem: Problem, bucket_bytes: int = 4096) -> Trajectory:
    model = problem.model()
    if group.rank:  # only the first rank's weights count
        for parameter in model.parameters():
            parameter.data.zero_()
    parallel = DistributedDataParallel(model, group, bucket_bytes=bucket_bytes)
    optimizer = OPTIMIZERS[problem.optimizer](model.parameters())
    result = Trajectory()
    for step in range(problem.steps):
        batch = problem.share(step, group)
        count = loss.global_count([targets for _, targets in batch], group)
        shares = []
        with parallel.no_sync():
            for part in batch[:-1]:
                shares.append(share_of_loss(parallel, part, count, problem.microbatches))
                shares[-1].backward()
        shares.append(share_of_loss(parallel, batch[-1], count, problem.microbatches))
        shares[-1].backward()
        parallel.finish()
        result.losses.append(float(loss.reported(torch.stack(shares).sum(), group)))
        result.gradients.append(gradients_of(model))
        limit = float("inf") if problem.max_norm is None else problem.max_norm
        result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit))
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = parameters_of(model)
    return result


def assert_matches(got: Trajectory, want: Trajectory) -> None:
    for step, gradients in enumerate(want.gradients):
        assert_equal_in_float64(got.gradients[step], gradients, f"gradient of step {step}")
    assert_equal_in_float64(norms_by_step(got.norms), norms_by_step(want.norms), "norm before clipping")
    assert_equal_in_float64(got.parameters, want.parameters, "parameter")
    assert got.losses == pytest.approx(want.losses, rel=1e-12)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_three_steps_match_serial_when_tokens_are_uneven(world_size: int, optimizer: str, microbatches: int) -> None:
    problem = Problem(optimizer=optimizer, microbatches=microbatches, max_norm=0.5)
    want = expected(problem)
    results = ranks.run(world_size, train, problem)
    for got in results:
        assert_matches(got, want)
        for name, parameter in results[0].parameters.items():
            assert torch.equal(got.parameters[name], parameter), f"{name} differs between ranks"
