"""Residual reductions and the global norm, on every factorisation of the world, against sums made in one process."""

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from zlib import crc32

import pytest
import torch
from torch import Tensor

from reference import comm, finalize
from reference.comm import Group, Groups
from reference.finalize import Layout
from reference.mesh import DENSE, EXPERT, LAYOUT, Mesh
from tests.reference import ranks
from tests.reference.traffic import Traffic

LAYOUTS = {
    "dense": Layout(),
    "column": Layout(sharded=("tp", "pp")),
    "norm of a sequence-parallel region": Layout(partial=("tp", *DENSE)),
    "expert": Layout(partial=EXPERT, sharded=("ep", "pp")),
    "column of an expert": Layout(partial=EXPERT, sharded=("tp", "ep", "pp")),
    "tied embedding": Layout(sharded=("tp",), tied=True),
}


def factorisations(world_size: int) -> list[Mesh]:
    choices = product(range(1, world_size + 1), repeat=len(LAYOUT))
    return [Mesh(**dict(zip(LAYOUT, c, strict=True))) for c in choices if prod(c) == world_size]


def held(name: str, place: dict[str, int], mesh: Mesh) -> bool:
    return name != "tied embedding" or place["pp"] in (0, mesh.pp - 1)


def contribution(name: str, place: dict[str, int]) -> Tensor:
    """A rank's own gradient: it depends on the axes along which ranks differ, and on no other."""
    layout = LAYOUTS[name]
    axes = (*layout.partial, *layout.sharded, *(("pp",) if layout.tied else ()))
    key = f"{name} {sorted((axis, place[axis]) for axis in axes)}"
    elements = (3, 2, 0)[min(place["tp"], 2)] if "tp" in layout.sharded else 4  # uneven shards, some empty
    return torch.randn(elements, generator=torch.Generator().manual_seed(crc32(key.encode())), dtype=torch.float64)


def final(name: str, place: dict[str, int], mesh: Mesh) -> Tensor:
    """The sum over all ranks that hold a part of this gradient."""
    layout = LAYOUTS[name]
    total = torch.zeros_like(contribution(name, place))
    for steps in product(*(range(mesh.size(axis)) for axis in layout.partial)):
        there = place | dict(zip(layout.partial, steps, strict=True))
        for stage in {0, mesh.pp - 1} if layout.tied else {place["pp"]}:
            total += contribution(name, there | {"pp": stage})
    return total


def true_norm(mesh: Mesh) -> float:
    """Every element of the whole model once: all shards, one replica."""
    squares = 0.0
    for name, layout in LAYOUTS.items():
        for steps in product(*(range(mesh.size(axis)) for axis in layout.sharded)):
            place = dict.fromkeys(LAYOUT, 0) | dict(zip(layout.sharded, steps, strict=True))
            squares += float(final(name, place, mesh).square().sum())
    return squares**0.5


def parameters(groups: Groups) -> dict[str, Tensor]:
    found = {}
    for name, layout in LAYOUTS.items():
        if held(name, groups.coordinates, groups.mesh):
            gradient = contribution(name, groups.coordinates)
            found[name] = torch.zeros_like(gradient).requires_grad_()
            found[name].grad = gradient
            finalize.lay(found[name], layout)
    return found


def entries(found: dict[str, Tensor]) -> Iterator[tuple[Tensor, Layout]]:
    for parameter in found.values():
        assert parameter.grad is not None
        yield parameter.grad, finalize.layout_of(parameter)


REDUCED: tuple[tuple[str, ...], ...] = ((), ("dp",), DENSE)
"""Axes over which DDP or ZeRO has summed already."""

Found = tuple[dict[str, Tensor], float, float]


def all_meshes(group: Group) -> list[list[Found]]:
    """Return what each mesh comes to, for each of `REDUCED`."""
    results = []
    for mesh in factorisations(group.size):
        groups = Groups(mesh, extra=[DENSE, ("cp", "ep"), ("ep", "dp"), ("cp", "dp")])
        results.append([one_mesh(groups, reduced) for reduced in REDUCED])
    return results


def one_mesh(groups: Groups, reduced: tuple[str, ...]) -> Found:
    found = parameters(groups)
    for parameter in found.values():  # what DDP would have done already
        done = tuple(axis for axis in finalize.layout_of(parameter).partial if axis in reduced)
        comm.all_reduce(parameter.grad, groups.along(*done)).wait()
    finalize.reduce_residuals(finalize.residuals(found.values(), groups, reduced))
    norm = float(finalize.global_norm(entries(found), groups))
    return {name: p.grad for name, p in found.items()}, norm, zero_norm(found, groups)


def zero_norm(found: dict[str, Tensor], groups: Groups) -> float:
    """The same norm where ZeRO has sharded every gradient over dp."""
    group = groups.along("dp")
    parts = [
        (gradient.tensor_split(group.size)[group.rank], Layout(layout.partial, (*layout.sharded, "dp"), layout.tied))
        for gradient, layout in entries(found)
    ]
    return float(finalize.global_norm(parts, groups))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_sums_and_norm_are_right_on_every_factorisation(world_size: int) -> None:
    results = ranks.run(world_size, all_meshes)
    for index, mesh in enumerate(factorisations(world_size)):
        want = true_norm(mesh)
        for rank, number in product(range(world_size), range(len(REDUCED))):
            gradients, norm, sharded = results[rank][index][number]
            assert norm == results[0][index][number][1], "every rank and stage must agree bitwise"
            assert norm == pytest.approx(want, rel=1e-12), mesh
            assert sharded == pytest.approx(want, rel=1e-12), mesh
            for name, gradient in gradients.items():
                expected = final(name, mesh.coordinates(rank), mesh)
                torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


MESH = Mesh(tp=2, ep=2, pp=2)

WRONG_NORMS: dict[str, Callable[[dict[str, Tensor], Groups], Tensor]] = {
    "replicated gradients counted once a tensor rank": lambda found, groups: finalize.global_norm(
        [(g, Layout(layout.partial, (*layout.sharded, "tp"))) for g, layout in entries(found)], groups
    ),
    "experts left out": lambda found, groups: finalize.global_norm(
        [(g, layout) for g, layout in entries(found) if "ep" not in layout.sharded], groups
    ),
    "one rank's experts stand for all": lambda found, groups: finalize.global_norm(
        [(g, Layout(layout.partial, tuple(set(layout.sharded) - {"ep"}))) for g, layout in entries(found)], groups
    ),
    "tied embedding counted on both stages": lambda found, groups: finalize.global_norm(
        [(g, Layout(layout.partial, (*layout.sharded, "pp"))) for g, layout in entries(found)], groups
    ),
    "each stage its own": lambda found, groups: over(found, groups, ("tp", "ep")),
    "each rank its own": lambda found, _: finalize.sum_of_squares([g for g, _ in entries(found)]).sqrt(),
}


def over(found: dict[str, Tensor], groups: Groups, axes: tuple[str, ...]) -> Tensor:
    here = [g for g, layout in entries(found) if finalize._counts_here(Layout(sharded=(*layout.sharded, "pp")), groups)]
    total = finalize.sum_of_squares(here)
    comm.all_reduce(total, groups.along(*axes)).wait()
    return total.sqrt()


@pytest.mark.parametrize("bug", WRONG_NORMS)
def test_known_wrong_norms_are_told_apart(bug: str) -> None:
    def wrong(_: Group) -> float:
        groups = Groups(MESH, extra=[("tp", "ep")])
        found = parameters(groups)
        finalize.reduce_residuals(finalize.residuals(found.values(), groups))
        return float(WRONG_NORMS[bug](found, groups))

    assert ranks.run(8, wrong) != [pytest.approx(true_norm(MESH), rel=1e-12)] * 8


def test_a_norm_before_the_reductions_is_wrong() -> None:
    def early(_: Group) -> float:
        groups = Groups(MESH)
        return float(finalize.global_norm(entries(parameters(groups)), groups))

    assert ranks.run(8, early)[0] != pytest.approx(true_norm(MESH), rel=1e-3)


def test_the_list_is_ordered_and_gradients_of_one_entry_travel_together() -> None:
    def listed(_: Group) -> tuple[list[str], int]:
        groups = Groups(Mesh(tp=2, ep=2, pp=2))
        found = parameters(groups)
        residuals = finalize.residuals(found.values(), groups)
        with Traffic() as traffic:
            finalize.reduce_residuals(residuals)
        return [residual.name for residual in residuals], traffic.count("allreduce_")

    for names, calls in ranks.run(8, listed):
        assert names == ["sequence", "tied", "data cp+ep+dp"], "experts lie alone along cp and dp here"
        assert calls == 3


def test_a_parameter_without_gradient_contributes_zeros() -> None:
    def one_sided(group: Group) -> Tensor:
        groups = Groups(Mesh(dp=group.size))
        parameter = torch.zeros(2, requires_grad=True)
        if group.rank == 0:
            parameter.grad = torch.ones(2)
        finalize.reduce_residuals(finalize.residuals([parameter, parameter], groups))
        assert parameter.grad is not None
        return parameter.grad

    assert all(torch.equal(gradient, torch.ones(2)) for gradient in ranks.run(3, one_sided))


def test_clipping_scales_like_torch_and_leaves_small_gradients_alone() -> None:
    gradients = [torch.full((3,), 4.0), torch.full((1,), 1.0), torch.empty(0)]
    norm = finalize.sum_of_squares(gradients).sqrt()
    assert float(norm) == pytest.approx(7.0)
    parameters = [torch.zeros_like(gradient).requires_grad_() for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    finalize.clip(gradients, norm, 2.0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad)
    before = gradients[0].clone()
    finalize.clip(gradients, finalize.sum_of_squares(gradients).sqrt(), 100.0)
    assert torch.equal(gradients[0], before)


def test_squares_of_bfloat16_gradients_are_summed_wide() -> None:
    gradient = torch.full((100_000,), 0.1).bfloat16()
    want = float(gradient.double().square().sum())
    # a norm rounded to bfloat16 may be off by 2^-9, and its square by twice that
    assert float(finalize.sum_of_squares([gradient])) == pytest.approx(want, rel=1e-4)
    assert float(finalize.sum_of_squares([])) == 0.0
