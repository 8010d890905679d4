"""The mesh is arithmetic: coordinates and ranks are inverse, groups partition the world, bad sizes are named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.mesh import DENSE, EXPERT, LAYOUT, Mesh

sizes = st.integers(1, 4)
meshes = st.builds(Mesh, tp=sizes, cp=sizes, ep=sizes, dp=sizes, pp=sizes)
axes_sets = st.lists(st.sampled_from(LAYOUT), unique=True).map(tuple)


@given(meshes)
def test_coordinates_and_ranks_are_inverse(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank_at(**place) for place in places] == list(range(mesh.world_size))


@given(meshes, axes_sets)
def test_groups_along_any_axes_partition_the_world_in_the_order_of_coordinates(
    mesh: Mesh, axes: tuple[str, ...]
) -> None:
    groups = mesh.partitions(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        assert len(group) == mesh.size(*axes)
        assert list(group) == sorted(group)
        for rank in group:
            assert mesh.ranks(rank, *axes) == group
    if len(axes) == 1:
        for group in groups:
            assert [mesh.coordinates(rank)[axes[0]] for rank in group] == list(range(mesh.size(*axes)))


@given(meshes, st.sampled_from(LAYOUT), st.integers(-5, 5))
def test_a_peer_differs_along_one_axis_alone(mesh: Mesh, axis: str, step: int) -> None:
    for rank in range(mesh.world_size):
        here, there = mesh.coordinates(rank), mesh.coordinates(mesh.peer(rank, axis, step))
        assert there.pop(axis) == (here.pop(axis) + step) % mesh.size(axis)
        assert here == there


def test_tensor_ranks_are_neighbours_and_data_ranks_are_farthest() -> None:
    mesh = Mesh(tp=2, pp=2, dp=2)
    assert mesh.ranks(0, "tp") == (0, 1)
    assert mesh.ranks(0, "pp") == (0, 2)
    assert mesh.ranks(0, "dp") == (0, 4)
    assert mesh.ranks(5, *DENSE) == mesh.ranks(5, *EXPERT) == (1, 5)


def test_bad_sizes_axes_and_ranks_are_named() -> None:
    with pytest.raises(ValueError, match="mesh axis ep has size 0"):
        Mesh(ep=0)
    with pytest.raises(ValueError, match=r"tp 2 x cp 1 x ep 1 x pp 3 x dp 1 has 6 ranks but the world has 8"):
        Mesh(tp=2, pp=3).require_world(8)
    with pytest.raises(ValueError, match="'zp' is not an axis"):
        Mesh().size("zp")
    with pytest.raises(ValueError, match="rank 2 is not on a mesh of 2 ranks"):
        Mesh(tp=2).coordinates(2)
    with pytest.raises(ValueError, match="dp coordinate 1 is outside an axis of size 1"):
        Mesh(tp=2).rank_at(dp=1)
