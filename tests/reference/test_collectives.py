"""Ring collectives: right at every size and world, at the bytes and steps that their table announces."""

from math import ceil, log2

import pytest
import torch
from torch import Tensor

from reference import collectives
from reference.comm import Group
from tests.reference import ranks
from tests.reference.traffic import Call, Traffic, loopback_bytes

WORLDS = [1, 2, 3, 4, 8]


def sizes(world_size: int) -> list[int]:
    return sorted({0, 1, world_size - 1, world_size, world_size + 1, 13, 101})


def part(rank: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def reduced(group: Group, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    whole, scattered = part(group.rank, size, dtype), part(group.rank, size, dtype)
    collectives.all_reduce(whole, group)
    return whole, collectives.reduce_scatter(scattered, group).clone()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_reduce_and_reduce_scatter_sum_every_size(world_size: int, dtype: torch.dtype) -> None:
    def every_size(group: Group) -> list[tuple[Tensor, Tensor]]:
        return [reduced(group, size, dtype) for size in sizes(group.size)]

    results = ranks.run(world_size, every_size)
    for index, size in enumerate(sizes(world_size)):
        parts = [part(rank, size, dtype).double() for rank in range(world_size)]
        exact = torch.stack(parts).sum(0)
        # each of p - 1 additions rounds a partial sum, which is never larger than the sum of magnitudes
        bound = (world_size - 1) * torch.finfo(dtype).eps * torch.stack(parts).abs().sum(0)
        for rank in range(world_size):
            whole, chunk = results[rank][index]
            assert ((whole.double() - exact).abs() <= bound).all()
            assert torch.equal(chunk, whole.tensor_split(world_size)[rank])
            assert torch.equal(whole, results[0][index][0]), "ranks must agree bitwise"


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_gather_fills_every_size(world_size: int) -> None:
    def every_size(group: Group) -> list[Tensor]:
        results = []
        for size in sizes(group.size):
            tensor = torch.full((size,), torch.nan, dtype=torch.float64)
            own = collectives.chunks_of(tensor, group)[group.rank]
            own.copy_(collectives.chunks_of(part(0, size), group)[group.rank])
            collectives.all_gather(tensor, group)
            results.append(tensor)
        return results

    for result in ranks.run(world_size, every_size):
        for size, tensor in zip(sizes(world_size), result, strict=True):
            assert torch.equal(tensor, part(0, size))


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_to_all_delivers_unequal_and_empty_blocks(world_size: int) -> None:
    def exchange(group: Group) -> list[Tensor]:
        inputs = [block(group.rank, target) for target in range(group.size)]
        outputs = [torch.empty_like(block(source, group.rank)) for source in range(group.size)]
        collectives.all_to_all(outputs, inputs, group)
        return outputs

    def block(source: int, target: int) -> Tensor:
        return part(10 * source + target, (source + 2 * target) % 5)

    for rank, outputs in enumerate(ranks.run(world_size, exchange)):
        for source, output in enumerate(outputs):
            assert torch.equal(output, block(source, rank))


@pytest.mark.parametrize("world_size", WORLDS)
def test_broadcast_reaches_all_from_every_source_in_logarithmic_steps(world_size: int) -> None:
    def from_every_source(group: Group) -> list[tuple[Tensor, int]]:
        results = []
        for source in range(group.size):
            tensor = part(group.rank, 7)
            with Traffic() as traffic:
                collectives.broadcast(tensor, source, group)
            results.append((tensor, traffic.count("send")))
        return results

    results = ranks.run(world_size, from_every_source)
    for source in range(world_size):
        assert all(torch.equal(result[source][0], part(source, 7)) for result in results)
        assert results[source][source][1] == (ceil(log2(world_size)) if world_size > 1 else 0)
        assert sum(result[source][1] for result in results) == world_size - 1


def test_all_to_all_refuses_the_wrong_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="3 ranks need as many tensors"):
        collectives.all_to_all([], [torch.ones(1)], Group((0, 1, 2), 0))


def calls(group: Group, name: str, size: int) -> list[Call]:
    with Traffic() as traffic:
        getattr(collectives, name)(part(group.rank, size), group)
    return traffic.calls


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("name", "passes"), [("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)])
def test_ring_bytes_and_steps_are_those_of_the_table(name: str, passes: int, world_size: int) -> None:
    steps, element = passes * (world_size - 1), 8
    for size in (world_size * 5, 101):
        results = ranks.run(world_size, calls, name, size)
        sent = [sum(call.sent for call in result) for result in results]
        assert sum(sent) == passes * (world_size - 1) * size * element, "exact, summed over ranks"
        for rank, result in enumerate(results):
            assert sum(call.name == "send" for call in result) == steps
            exact = steps * size * element / world_size
            assert abs(sent[rank] - exact) <= (passes * element if size % world_size else 0)


def test_kernel_counts_the_bytes_of_a_ring_all_reduce() -> None:
    size, world_size = 1 << 19, 4
    payload = 2 * (world_size - 1) * size * 8
    measured = loopback_bytes(world_size, calls, "all_reduce", size)
    # headers: 40 bytes of IPv4 and TCP with each segment and acknowledgement, well under 3 %
    assert payload <= measured <= 1.03 * payload
