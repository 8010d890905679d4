"""A run that was saved on one mesh goes on, on another one, as if nothing had happened."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from reference.comm import Group, Groups
from reference.hybrid import checkpoints
from reference.hybrid.plan import Plan
from reference.hybrid.trainer import EVERYBODY_WITH_A_SHARE, Trainer, share
from reference.mesh import Mesh
from tests.reference import ranks
from tests.reference.equivalence import assert_equal_in_float64
from tests.reference.hybrid.training import DENSE, EXPERTS, Part, joined, parts, problem_of
from tests.reference.training import OPTIMIZERS, Problem, serial

SAVED_AFTER = 1


def trainer_of(plan: Plan, problem: Problem) -> tuple[Trainer, Groups]:
    groups = Groups(plan.mesh, extra=[EVERYBODY_WITH_A_SHARE])
    return Trainer(problem.model(), plan, groups, OPTIMIZERS[problem.optimizer], bucket_bytes=16_000), groups


def steps(trainer: Trainer, groups: Groups, problem: Problem, which: Sequence[int]) -> list[float]:
    losses = []
    for step in which:
        batch = [(share(a, trainer.plan, groups), share(b, trainer.plan, groups)) for a, b in problem.batch(step)]
        losses.append(float(trainer.step(batch, problem.max_norm).loss))
    return losses


def begin(_: Group, plan: Plan, problem: Problem, folder: Path) -> list[float]:
    trainer, groups = trainer_of(plan, problem)
    losses = steps(trainer, groups, problem, range(SAVED_AFTER))
    checkpoints.save(trainer, folder, SAVED_AFTER)
    return losses


def go_on(_: Group, plan: Plan, problem: Problem, folder: Path) -> tuple[list[float], dict[str, Part]]:
    trainer, groups = trainer_of(plan, replace(problem))
    done = checkpoints.load(trainer, folder)
    losses = steps(trainer, groups, problem, range(done, problem.steps))
    return losses, parts(trainer, groups, gradients=False)


MESHES = {
    "tp2 pp2 to tp4": (Mesh(tp=2, pp=2), Mesh(tp=4), 0, 0),
    "dp4 with zero to tp2 dp2": (Mesh(dp=4), Mesh(tp=2, dp=2), 1, 0),
    "pp4 to dp2 with zero": (Mesh(pp=4), Mesh(dp=2), 0, 2),
    "serial to cp2 with zero": (Mesh(), Mesh(cp=2), 0, 1),
    "dp2 with zero to serial": (Mesh(dp=2), Mesh(), 2, 0),
}


@pytest.mark.parametrize(("case", "optimizer"), [*((case, "adamw") for case in MESHES), ("tp2 pp2 to tp4", "sgd")])
def test_training_goes_on_on_another_mesh(case: str, optimizer: str, tmp_path: Path) -> None:
    before, after, zero_before, zero_after = MESHES[case]
    plan = Plan(DENSE, before, 8, 16, microbatches=before.pp, zero=zero_before)
    require_goes_on(plan, replace(plan, mesh=after, zero=zero_after), optimizer, tmp_path)


def test_experts_move_to_other_ranks(tmp_path: Path) -> None:
    plan = Plan(EXPERTS, Mesh(ep=4), 8, 16)
    require_goes_on(plan, replace(plan, mesh=Mesh(ep=2, tp=2), zero=1), "adamw", tmp_path)


def require_goes_on(plan: Plan, other: Plan, optimizer: str, folder: Path) -> None:
    problem = problem_of(plan, optimizer, 0.1)
    expected = ranks.alone(serial, problem)
    first = run(plan.mesh.world_size, begin, plan, problem, folder)
    later = run(other.mesh.world_size, go_on, other, problem, folder)
    for losses, (rest, _) in zip(first * len(later), later, strict=False):
        assert [*losses, *rest] == pytest.approx(expected.losses, rel=1e-10)
    got = joined([held for _, held in later], expected.parameters)
    assert_equal_in_float64(got, expected.parameters, "parameter")


def run(world_size: int, function, *arguments) -> list:
    return ranks.run(world_size, function, *arguments) if world_size > 1 else [ranks.alone(function, *arguments)]


def refused(_: Group, plan: Plan, problem: Problem, folder: Path) -> str:
    trainer, _groups = trainer_of(plan, problem)
    with pytest.raises(ValueError, match="lacks") as caught:
        checkpoints.load(trainer, folder)
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    plan = Plan(DENSE, Mesh(), 8, 16)
    ranks.alone(begin, plan, problem_of(plan, "sgd", None), tmp_path)
    deeper = replace(plan, config=replace(DENSE, num_layers=5))
    assert "blocks.4" in ranks.alone(refused, deeper, problem_of(deeper, "sgd", None), tmp_path)
