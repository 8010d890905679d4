"""Every factorisation of the world trains as serial training does: losses, norms, gradients, parameters."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import pytest

from reference.hybrid.plan import Plan
from reference.mesh import LAYOUT, Mesh
from reference.model import GPTConfig
from tests.reference import ranks
from tests.reference.equivalence import assert_equal_in_float64
from tests.reference.hybrid.training import DENSE, EXPERTS, Share, joined, problem_of, train
from tests.reference.training import Problem, Trajectory, norms_by_step, serial

SEQUENCES, LENGTH = 8, 16


def factorisations(world_size: int) -> list[Mesh]:
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    sizes = [each for each in product(divisors, repeat=len(LAYOUT)) if prod(each) == world_size]
    return [Mesh(**dict(zip(LAYOUT, each, strict=True))) for each in sizes]


def named(mesh: Mesh) -> str:
    return " ".join(f"{axis}{mesh.size(axis)}" for axis in LAYOUT if mesh.size(axis) > 1) or "serial"


Run = tuple[Plan, Problem]


def run(plan: Plan, optimizer: str = "sgd", max_norm: float | None = None) -> Run:
    return plan, problem_of(plan, optimizer, max_norm)


def layers(config: GPTConfig, mesh: Mesh) -> GPTConfig:
    """Return the model with as few layers and experts as the mesh allows: 8 ranks pay for each, on every mesh."""
    return replace(config, num_layers=max(2, mesh.pp), num_experts=config.num_experts and max(4, mesh.ep))


def plain(mesh: Mesh) -> Run:
    """No ZeRO, no sequence parallelism; experts only where an axis is theirs."""
    config = layers(EXPERTS if mesh.ep > 1 else DENSE, mesh)
    return run(Plan(config, mesh, SEQUENCES, LENGTH, microbatches=mesh.pp, schedule="gpipe"))


def everything(mesh: Mesh) -> Run:
    """ZeRO, sequence parallelism, experts, recomputation, clipping and AdamW at once."""
    return run(
        Plan(
            layers(EXPERTS, mesh),
            mesh,
            SEQUENCES,
            LENGTH,
            microbatches=max(2, mesh.pp),
            schedule="1f1b",
            zero=1 + mesh.dp % 2,
            sequence_parallel=mesh.tp > 1,
            recompute=mesh.cp > 1,
        ),
        optimizer="adamw",
        max_norm=0.1,
    )


@cache
def expected_of(problem: Problem) -> Trajectory:
    return ranks.alone(serial, problem)


def require_serial(runs: Sequence[Run], world_size: int) -> None:
    by_rank = ranks.run(world_size, train, list(runs))
    for number, (_, problem) in enumerate(runs):
        _require_same([shares[number] for shares in by_rank], expected_of(problem))


def _require_same(shares: list[Share], expected: Trajectory) -> None:
    for share in shares:
        assert share.losses == pytest.approx(expected.losses, rel=1e-10)
        assert_equal_in_float64(norms_by_step(share.norms), norms_by_step([n.double() for n in expected.norms]), "norm")
    if shares[0].gradients:
        wanted = expected.gradients[0]
        assert_equal_in_float64(joined([share.gradients for share in shares], wanted), wanted, "gradient")
    got = joined([share.parameters for share in shares], expected.parameters)
    assert_equal_in_float64(got, expected.parameters, "parameter")


@pytest.mark.parametrize("mesh", factorisations(8), ids=named)
def test_every_factorisation_of_eight_trains_as_one_process_does(mesh: Mesh) -> None:
    require_serial([plain(mesh), everything(mesh)], 8)


@pytest.mark.parametrize("mesh", [Mesh(), *(Mesh(**{axis: n}) for axis in ("dp", "pp") for n in (2, 3, 4))], ids=named)
def test_smaller_worlds_train_as_one_process_does(mesh: Mesh) -> None:
    plan = Plan(DENSE, mesh, SEQUENCES if mesh.dp != 3 else 9, LENGTH, microbatches=3)
    require_serial([run(plan)], mesh.world_size)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "dual_pipe_v"])
def test_every_schedule_and_stage_of_zero_trains_as_one_process_does(schedule, zero) -> None:
    plan = Plan(EXPERTS, Mesh(pp=2, dp=2), SEQUENCES, LENGTH, microbatches=4, schedule=schedule, zero=zero)
    require_serial([run(plan, "adamw", 0.1)], 4)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_that_no_hook_announced_are_reduced_too(zero) -> None:
    """With one microbatch a split backward adds each weight's gradient after autograd is through."""
    plan = Plan(DENSE, Mesh(pp=2, dp=2), SEQUENCES, LENGTH, microbatches=1, schedule="zero_bubble", zero=zero)
    require_serial([run(plan)], 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": Mesh(tp=3)}, "8 query heads do not divide by 3 tensor parallel ranks"),
        ({"mesh": Mesh(dp=3)}, "8 sequences of a microbatch do not divide by 3 data ranks"),
        ({"mesh": Mesh(cp=3)}, "16 tokens of a sequence do not divide by 6 zigzag parts"),
        ({"mesh": Mesh(ep=2)}, "axis ep has size 2, but the model has no experts"),
        ({"mesh": Mesh(ep=3), "config": EXPERTS, "sequences": 9}, "4 experts do not divide by 3"),
        ({"mesh": Mesh(pp=9), "microbatches": 9}, "4 layers are too few for 9 pipeline stages"),
        ({"zero": 3}, "ZeRO stage 3 is not 0, 1 or 2"),
        ({"mesh": Mesh(pp=2), "schedule": "interleaved", "microbatches": 3}, "3"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_with_its_numbers(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**{"config": DENSE, "sequences": SEQUENCES, "length": LENGTH, **arguments})
