"""Traffic: every collective on every world, in any order of waiting, by index in the group and never by global rank."""

import pytest
import torch
from torch import Tensor

from reference import comm
from reference.comm import ALONE, Group, Groups
from reference.mesh import DENSE, LAYOUT, Mesh
from tests.reference import ranks
from tests.reference.traffic import Traffic

WORLDS = [1, 2, 3, 4, 8]


def part(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def every_collective(group: Group) -> dict[str, Tensor]:
    p, own = group.size, part(group.rank, 3 * group.size, 2)
    summed, largest = own.clone(), own.clone()
    comm.all_reduce(summed, group).wait()
    comm.all_reduce(largest, group, "max").wait()
    copied, centred = own.clone(), own.clone()
    comm.broadcast(copied, p - 1, group).wait()
    comm.reduce(centred, 0, group).wait()
    shifted = torch.empty_like(own)
    comm.ring_shift(own, shifted, group, 2).wait()
    exchanged = torch.empty_like(own)
    comm.all_to_all_into(exchanged, own, group).wait()
    return {
        "sum": summed,
        "max": largest,
        "broadcast": copied,
        "reduce": centred,
        "shift": shifted,
        "all_to_all": exchanged,
        "gather rows": comm.all_gather(own, group, 0),
        "gather columns": comm.all_gather(own, group, 1),
        "scatter rows": comm.reduce_scatter(own, group, 0),
        "scatter strided columns": comm.reduce_scatter(own.T, group, 1),
    }


@pytest.mark.parametrize("p", WORLDS)
def test_collectives_match_their_definition(p: int) -> None:
    parts = [part(rank, 3 * p, 2) for rank in range(p)]
    total = torch.stack(parts).sum(0)
    for rank, got in enumerate(ranks.run(p, every_collective)):
        want = {
            "sum": total,
            "max": torch.stack(parts).amax(0),
            "broadcast": parts[p - 1],
            "shift": parts[(rank - 2) % p],
            "all_to_all": torch.cat([other.chunk(p)[rank] for other in parts]),
            "gather rows": torch.cat(parts, 0),
            "gather columns": torch.cat(parts, 1),
            "scatter rows": total.chunk(p)[rank],
            "scatter strided columns": total.T.chunk(p, 1)[rank],
        }
        if rank == 0:
            want["reduce"] = total
        for name, expected in want.items():
            torch.testing.assert_close(got[name], expected, rtol=1e-13, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def test_many_operations_in_flight_do_not_mix_their_messages() -> None:
    def in_flight(group: Group) -> bool:
        rounds = range(6)
        fulls = [part(10 * group.rank + i, 4 * (i + 1)) for i in rounds]
        sums = [torch.empty(i + 1, dtype=torch.float64) for i in rounds]
        gathered = [torch.empty(4 * (i + 1), dtype=torch.float64) for i in rounds]
        pending = []
        for i in rounds:
            pending.append(comm.reduce_scatter_into(sums[i], fulls[i], group))
            pending.append(comm.all_gather_into(gathered[i], part(100 + 10 * group.rank + i, i + 1), group))
        for travel in reversed(pending):
            travel.wait()
            travel.wait()
        right = True
        for i in rounds:
            total = torch.stack([part(10 * r + i, 4 * (i + 1)) for r in range(4)]).sum(0)
            right &= torch.allclose(sums[i], total.chunk(4)[group.rank], rtol=1e-13, atol=1e-13)
            right &= torch.equal(gathered[i], torch.cat([part(100 + 10 * r + i, i + 1) for r in range(4)]))
        return right

    assert all(ranks.run(4, in_flight))


def test_uneven_all_to_all_moves_rows_to_their_owner() -> None:
    def rows(source: int, target: int) -> int:
        return (source * 2 + target) % 4

    def exchange(group: Group) -> Tensor:
        blocks = [torch.full((rows(group.rank, t), 3), 10.0 * group.rank + t) for t in range(3)]
        sizes = [rows(s, group.rank) for s in range(3)]
        output = torch.empty(sum(sizes), 3)
        comm.all_to_all_into(output, torch.cat(blocks), group, sizes, [len(block) for block in blocks]).wait()
        return output[:, 0]

    for rank, got in enumerate(ranks.run(3, exchange)):
        assert got.tolist() == [10.0 * s + rank for s in range(3) for _ in range(rows(s, rank))]


@pytest.mark.parametrize("mesh", [Mesh(tp=2, pp=2, dp=2), Mesh(cp=2, ep=4), Mesh(tp=4, dp=2), Mesh(pp=8)], ids=str)
def test_groups_speak_of_indices_and_not_of_global_ranks(mesh: Mesh) -> None:
    def over_every_axis(_: Group) -> dict[str, tuple[float, float, list[float]]]:
        groups = Groups(mesh)
        results = {}
        for axes in (*((axis,) for axis in LAYOUT), DENSE):
            group = groups.along(*axes)
            source = torch.tensor([float(groups.rank)])
            comm.broadcast(source, group.size - 1, group).wait()
            behind = torch.zeros(1)
            comm.ring_shift(torch.tensor([float(groups.rank)]), behind, group).wait()
            gathered = comm.all_gather(torch.tensor([float(groups.rank)]), group)
            results["+".join(axes)] = (float(source), float(behind), gathered.tolist())
        ends = groups.first_and_last_stage()
        results["ends"] = (0.0, 0.0, [float(rank) for rank in ends.ranks])
        return results

    for rank, got in enumerate(ranks.run(8, over_every_axis)):
        for axes in (*((axis,) for axis in LAYOUT), DENSE):
            members = mesh.ranks(rank, *axes)
            behind = members[(members.index(rank) - 1) % len(members)]
            assert got["+".join(axes)] == (members[-1], behind, list(members))
        stages = mesh.ranks(rank, "pp")
        is_end = rank in (stages[0], stages[-1])
        assert got["ends"][2] == ([stages[0], stages[-1]] if is_end and len(stages) > 1 else [rank])


def test_a_group_that_was_not_made_is_named() -> None:
    def ask(_: Group) -> None:
        groups = Groups(Mesh(tp=2, dp=2), extra=[])
        with pytest.raises(ValueError, match="3 ranks but the world has 4"):
            Groups(Mesh(tp=3))
        three = Groups(Mesh(tp=2, dp=2))
        assert three.along("tp", "dp").size == 4, "the whole world is always there"
        assert groups.along("tp", "pp").size == 2

    ranks.run(4, ask)


def test_alone_nothing_is_sent_and_results_are_right() -> None:
    with Traffic() as traffic:
        got = every_collective(ALONE)
    assert traffic.calls == []
    own = part(0, 3, 2)
    assert all(torch.equal(tensor, own.T if "strided" in name else own) for name, tensor in got.items())


def test_sizes_that_do_not_divide_are_named() -> None:
    group = Group((0, 1, 2), 0)
    with pytest.raises(ValueError, match="dimension 1 of size 4 does not divide by 3 ranks"):
        comm.reduce_scatter(torch.ones(3, 4), group, 1)
    with pytest.raises(ValueError, match="4 rows do not divide by 3 ranks"):
        comm.all_to_all_into(torch.ones(4), torch.ones(4), group)


def test_a_failing_rank_is_reported_with_its_traceback_and_a_silent_one_is_named() -> None:
    def fail(group: Group) -> None:
        if group.rank == 1:
            raise ValueError("only here")
        comm.barrier(group)

    def hang(group: Group) -> None:
        if group.rank == 1:
            comm.receive(torch.empty(1), 0, group)

    with pytest.raises(ranks.RankError, match=r"rank 1 failed:[\s\S]*only here"):
        ranks.run(2, fail)
    with pytest.raises(ranks.RankError, match=r"ranks \[0, 1\] of 2 had not finished after 1.5 s"):
        ranks.run(2, hang, timeout_s=1.5)
