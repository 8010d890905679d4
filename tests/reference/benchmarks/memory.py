"""`make bench-memory`: what each rank holds at its peak, against the formulas, as a table."""

import sys
from collections.abc import Callable, Sequence

import click
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from reference.comm import Group, Groups
from reference.hybrid.plan import Plan
from reference.hybrid.stage import Stage
from reference.hybrid.trainer import EVERYBODY_WITH_A_SHARE
from reference.mesh import Mesh
from reference.model import GPT, GPTConfig
from reference.pipeline_parallel.one_forward_one_backward import one_forward_one_backward
from reference.pipeline_parallel.runtime import Pipeline, _Step
from tests.reference import ranks
from tests.reference.data_parallel.test_memory import PROBLEM, held

CONFIG = GPTConfig(vocab_size=64, max_positions=64, num_layers=2, num_heads=8, width=64)
MICROBATCHES = 8


def saved_by_a_block(_: Group, mesh: Mesh, sequence_parallel: bool) -> int:
    """Return the bytes that autograd keeps of one block, parameters left out, each storage once."""
    plan = Plan(CONFIG, mesh, sequences=2, length=64, sequence_parallel=sequence_parallel)
    stage = Stage(GPT(CONFIG), 0, plan, Groups(mesh, extra=[EVERYBODY_WITH_A_SHARE]))
    parameters = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    length = 64 // mesh.tp if sequence_parallel else 64
    x = torch.randn(2, length, 64, requires_grad=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out, _auxiliary = stage.blocks[0](x, stage.positions)
    assert out.requires_grad
    return sum(kept.values())


def live_microbatches(group: Group) -> int:
    """Return the most microbatches whose activations one rank kept at once while 1F1B ran."""
    most = 0

    class Counting(_Step):
        def take(self, action) -> None:
            nonlocal most
            super().take(action)
            most = max(most, len(self._kept))

    pipeline = Pipeline(
        one_forward_one_backward(group.size, MICROBATCHES),
        {group.rank: nn.Linear(8, 8)},
        group,
        shape=(4, 8),
        dtype=torch.float32,
    )
    step = Counting(pipeline, [torch.ones(4, 8)] * MICROBATCHES, lambda out, _: F.mse_loss(out, torch.zeros_like(out)))
    for action in pipeline.schedule.ranks[group.rank]:
        step.take(action)
    step.finish()
    return most


Row = tuple[str, int, Sequence[float], Sequence[float]]


def zero_rows() -> list[Row]:
    """Bytes of parameters, gradients and states in mixed precision with Adam."""
    n = sum(parameter.numel() for parameter in PROBLEM.model().parameters())
    formulas: dict[str, Callable[[int], float]] = {
        "zero1": lambda p: 4 * n + 12 * n / p,
        "zero2": lambda p: 2 * n + 14 * n / p,
        "zero3": lambda p: 16 * n / p,
    }
    return [
        (f"{name}, bytes", p, ranks.run(p, held, name), [formula(p)] * p)
        for name, formula in formulas.items()
        for p in (2, 4, 8)
    ]


def sequence_rows() -> list[Row]:
    """Activations of a block: with sequence parallelism everything is divided by t."""
    whole = ranks.alone(saved_by_a_block, Mesh(), False)
    return [
        ("sequence parallel block, bytes", t, ranks.run(t, saved_by_a_block, Mesh(tp=t), True), [whole / t] * t)
        for t in (2, 4, 8)
    ]


def pipeline_rows() -> list[Row]:
    """Microbatches alive: p - rank."""
    return [
        ("1F1B, microbatches alive", p, ranks.run(p, live_microbatches), [p - rank for rank in range(p)])
        for p in (2, 4, 8)
    ]


@click.command()
def main() -> None:
    """Print the table; exit 1 where a rank holds more than 2 % over its formula."""
    torch.set_num_threads(1)
    over = False
    click.echo(f"{'what':<34}{'ranks':>6}{'measured (largest)':>20}{'formula':>12}{'ratio':>8}")
    for what, size, measured, formula in (*zero_rows(), *sequence_rows(), *pipeline_rows()):
        ratios = [found / expected for found, expected in zip(measured, formula, strict=True)]
        worst = max(ratios)
        over |= worst > 1.02
        click.echo(f"{what:<34}{size:>6}{max(measured):>20,.0f}{max(formula):>12,.0f}{worst:>8.3f}")
    sys.exit(over)


if __name__ == "__main__":
    main()
