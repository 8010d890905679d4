"""Conjugate pairs: forward is the definition, backward is its transpose, also for gradients of odd strides."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reference import autograd, comm
from reference.comm import ALONE, Group
from tests.reference import ranks

WORLDS = [1, 2, 3, 4]
Operation = Callable[[Tensor, Group], Tensor]


def sizes(source: int, p: int) -> list[int]:
    """Rows that `source` sends to each rank."""
    return [(source + 2 * target) % 3 + 1 for target in range(p)]


def uneven(x: Tensor, group: Group) -> Tensor:
    p = group.size
    mine = sizes(group.rank, p)
    return autograd.all_to_all(x[: sum(mine)], group, [sizes(s, p)[group.rank] for s in range(p)], mine)


OPERATIONS: dict[str, Operation] = {
    "copy": autograd.copy,
    "reduce": autograd.reduce,
    "gather rows": lambda x, g: autograd.gather(x, g, 0),
    "gather columns": autograd.gather,
    "scatter rows": lambda x, g: autograd.scatter(x, g, 0),
    "scatter columns": autograd.scatter,
    "all_gather rows": autograd.all_gather,
    "all_gather columns": lambda x, g: autograd.all_gather(x, g, 1),
    "reduce_scatter rows": autograd.reduce_scatter,
    "reduce_scatter columns": lambda x, g: autograd.reduce_scatter(x, g, 1),
    "all_to_all": autograd.all_to_all,
    "uneven all_to_all": uneven,
}
REPLICATED_INPUT = {"copy", "scatter rows", "scatter columns"}
"""The input is the same tensor on every rank, and its gradient too; elsewhere ranks hold parts of one long input."""
REPLICATED_OUTPUT = {"reduce", "gather rows", "gather columns"}
"""The output is the same on every rank, and the caller sees to it that its gradient is too."""


def draw(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def forward_and_backward(group: Group, name: str, strided: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return input, output, the output's gradient and the input's gradient."""
    x = draw(0 if name in REPLICATED_INPUT else group.rank, 12, 12).requires_grad_()
    y = OPERATIONS[name](x, group)
    seed = 50 + (0 if name in REPLICATED_OUTPUT else group.rank)
    gradient = draw(seed, *reversed(y.shape)).T if strided else draw(seed, *y.shape)
    y.backward(gradient)
    assert x.grad is not None
    return x.detach(), y.detach(), gradient, x.grad


@pytest.mark.parametrize("p", WORLDS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_backward_is_the_transpose_of_forward(name: str, strided: bool, p: int) -> None:
    """For a linear map, <y, dy> = <x, dx> over the whole world; what is replicated is one tensor and counts once."""
    results = ranks.run(p, forward_and_backward, name, strided)
    input_side = [float((x * dx).sum()) for x, _, _, dx in results]
    output_side = [float((y * dy).sum()) for _, y, dy, _ in results]
    left = input_side[0] if name in REPLICATED_INPUT else sum(input_side)
    right = output_side[0] if name in REPLICATED_OUTPUT else sum(output_side)
    assert left == pytest.approx(right, rel=1e-12)
    if name in REPLICATED_INPUT:
        assert all(torch.equal(dx, results[0][3]) for *_, dx in results), "equal on all ranks"


@pytest.mark.parametrize("p", WORLDS)
def test_forward_is_the_definition(p: int) -> None:
    parts = [draw(rank, 12, 12) for rank in range(p)]
    total = torch.stack(parts).sum(0)
    want: dict[str, Callable[[int], Tensor]] = {
        "copy": lambda _: parts[0],
        "reduce": lambda _: total,
        "gather rows": lambda _: torch.cat(parts),
        "gather columns": lambda _: torch.cat(parts, 1),
        "scatter rows": lambda r: parts[0].chunk(p)[r],
        "scatter columns": lambda r: parts[0].chunk(p, 1)[r],
        "all_gather rows": lambda _: torch.cat(parts),
        "all_gather columns": lambda _: torch.cat(parts, 1),
        "reduce_scatter rows": lambda r: total.chunk(p)[r],
        "reduce_scatter columns": lambda r: total.chunk(p, 1)[r],
        "all_to_all": lambda r: torch.cat([x.chunk(p)[r] for x in parts]),
        "uneven all_to_all": lambda r: torch.cat(
            [x[: sum(sizes(s, p))].split(sizes(s, p))[r] for s, x in enumerate(parts)]
        ),
    }

    def all_of_them(group: Group) -> dict[str, Tensor]:
        inputs = {name: draw(0 if name in REPLICATED_INPUT else group.rank, 12, 12) for name in OPERATIONS}
        return {name: operation(inputs[name], group) for name, operation in OPERATIONS.items()}

    for rank, got in enumerate(ranks.run(p, all_of_them)):
        for name, expected in want.items():
            torch.testing.assert_close(got[name], expected(rank), rtol=1e-13, atol=1e-13)


def test_an_all_reduce_that_autograd_does_not_see_loses_remote_gradients() -> None:
    """Why this file exists: the plain collective leaves the other ranks' part of the gradient out."""

    def scaled(group: Group, seen: bool) -> float:
        x = torch.tensor(2.0 + group.rank, dtype=torch.float64, requires_grad=True)
        y = x * x
        if seen:
            y = autograd.reduce(autograd.copy(y, ALONE), group)
        else:
            with torch.no_grad():
                comm.all_reduce(y, group).wait()
        # every rank computes rank-dependent work with the sum, so gradients are partial sums
        z = autograd.copy(y, group) if seen else y
        (z * (group.rank + 1)).backward()
        assert x.grad is not None
        return float(x.grad)

    right = [2 * (2.0 + rank) * 3 for rank in range(2)]
    assert ranks.run(2, scaled, True) == right
    assert ranks.run(2, scaled, False) != right
