"""All traffic: the only file that calls `torch.distributed`.

Every function takes a `Group` and speaks of *indices in that group*, never of global ranks. A group of one
rank sends nothing, so serial code and parallel code are the same code. Operations that can run in the
background return a `Pending`; call `wait` before touching the tensors again.

On CUDA tensors the calls are NCCL's own collectives. On CPU tensors (gloo) all-gather and reduce-scatter are
done here by direct exchange, because gloo's reduce-scatter is an all-reduce in disguise: it sends 2(p-1)/p n
instead of (p-1)/p n and takes several times as long.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import DENSE, EXPERT, LAYOUT, Mesh

Message = tuple[Tensor, int]
"""A tensor and the group index that it goes to or comes from."""

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Group:
    """Some ranks that talk to each other.

    Attributes:
        ranks: Global ranks, ascending.
        rank: This process's index in `ranks`.
        handle: The process group; None where the group is this rank alone.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @classmethod
    def of(cls, handle: dist.ProcessGroup) -> Group:
        """Wrap a process group of torch's."""
        return cls(tuple(dist.get_process_group_ranks(handle)), dist.get_rank(handle), handle)


ALONE = Group()
"""The group of a program that runs on one process, with no process group at all."""


class Pending:
    """Something on its way; after `wait` its tensors may be read and written. More waits do nothing."""

    __slots__ = ("_finish", "_works")

    def __init__(self, works: Iterable[dist.Work] = (), finish: Callable[[], None] | None = None) -> None:
        self._works = list(works)
        self._finish = finish

    def wait(self) -> None:
        """Wait for all messages, then do the arithmetic that belongs to them."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Groups:
    """The process groups that a mesh names, for one rank. All ranks make this together.

    Args:
        mesh: The layout; its product must be the world's size.
        extra: Sets of axes wanted besides each axis alone, the dense, the expert and the world group.

    Raises:
        ValueError: The mesh does not multiply to the world.
    """

    def __init__(self, mesh: Mesh, extra: Sequence[tuple[str, ...]] = ()) -> None:
        everyone = world()
        mesh.require_world(everyone.size)
        self.mesh = mesh
        self.rank = everyone.rank
        self.coordinates = mesh.coordinates(self.rank)
        self._made = {everyone.ranks: everyone}
        for axes in (*((axis,) for axis in LAYOUT), DENSE, EXPERT, *extra):
            for ranks in mesh.partitions(*axes):
                self._make(ranks)
        for stages in mesh.partitions("pp"):
            self._make((stages[0], stages[-1]))

    def _make(self, ranks: tuple[int, ...]) -> None:
        if len(set(ranks)) < len(ranks) or len(ranks) == 1 or ranks in self._made:
            return
        # Torch wants every rank to take part in making every group, in one order, members or not.
        handle = dist.new_group(list(ranks))
        index = ranks.index(self.rank) if self.rank in ranks else -1
        self._made[ranks] = Group(ranks, index, handle)

    def along(self, *axes: str) -> Group:
        """Return this rank's group along `axes`; its index there is its coordinate, inner axes fastest."""
        return self._find(self.mesh.ranks(self.rank, *axes), axes)

    def first_and_last_stage(self) -> Group:
        """Return the first and last pipeline stage, which share a tied embedding; else this rank alone."""
        stages = self.mesh.ranks(self.rank, "pp")
        ends = (stages[0], stages[-1])
        return self._find(ends if self.rank in ends and len(stages) > 1 else (self.rank,), ("pp",))

    def _find(self, ranks: tuple[int, ...], axes: tuple[str, ...]) -> Group:
        if len(ranks) == 1:
            return Group(ranks, 0)
        if ranks not in self._made:
            raise ValueError(f"no group was made along {axes}; name it in Groups(mesh, extra=[{axes}])")
        return self._made[ranks]


def start(
    backend: str | None = None,
    *,
    store: dist.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    timeout_s: float = 300.0,
) -> Group:
    """Join the world and return its group.

    Args:
        backend: `gloo` or `nccl`; left out, torch chooses for the devices present.
        store: Where ranks meet. Left out, the environment that `torchrun` sets says it, and rank and size
            too.
        rank: This process's global rank, with `store`.
        world_size: The number of ranks, with `store`.
        timeout_s: Seconds after which a collective that a peer never joins raises.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return world()


def stop() -> None:
    """Leave the world."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world() -> Group:
    """Return the group of all ranks; a group of one where no world was joined."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    return Group(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def barrier(group: Group) -> None:
    """Return when every rank of the group has called."""
    if group.size > 1:
        dist.barrier(group.handle)


def exchange(sends: Sequence[Message], receives: Sequence[Message], group: Group) -> Pending:
    """Start sends and receives at once, so that no order of peers can deadlock. Empty tensors are not sent.

    Args:
        sends: Contiguous tensors with the index they go to.
        receives: Contiguous tensors to overwrite with the index they come from. Messages of one pair of ranks
            arrive in the order in which they were sent.
        group: The group whose indices these are.
    """
    operations = [
        dist.P2POp(call, tensor, group=group.handle, group_peer=peer)
        for call, messages in ((dist.irecv, receives), (dist.isend, sends))
        for tensor, peer in messages
        if tensor.numel()
    ]
    return Pending(dist.batch_isend_irecv(operations) if operations else ())


def send(tensor: Tensor, destination: int, group: Group) -> None:
    """Send to one index and wait. On gloo this returns only when the receiver has come (a rendezvous)."""
    exchange([(tensor, destination)], [], group).wait()


def receive(tensor: Tensor, source: int, group: Group) -> None:
    """Overwrite `tensor` with what `source` sends."""
    exchange([], [(tensor, source)], group).wait()


def ring_shift(tensor: Tensor, received: Tensor, group: Group, step: int = 1) -> Pending:
    """Send `tensor` `step` places round the ring, and fill `received` from as many places behind.

    Sends `tensor`'s bytes. Safe for odd rings: send and receive start together. A whole round is a copy.
    """
    if step % group.size == 0:
        received.copy_(tensor)
        return Pending()
    ahead, behind = (group.rank + step) % group.size, (group.rank - step) % group.size
    return exchange([(tensor, ahead)], [(received, behind)], group)


def all_reduce(tensor: Tensor, group: Group, operation: str = "sum") -> Pending:
    """Combine `tensor` over the group, in place. Sends 2(p-1)/p of its bytes.

    Args:
        tensor: Contiguous; same shape and dtype on every rank.
        group: Who takes part.
        operation: `sum`, `max` or `min`.
    """
    if group.size == 1 or tensor.numel() == 0:
        return Pending()
    work = dist.all_reduce(tensor, _OPERATIONS[operation], group.handle, async_op=True)
    return Pending([work])


def reduce(tensor: Tensor, destination: int, group: Group) -> Pending:
    """Sum `tensor` into index `destination`, in place; elsewhere its contents are then undefined."""
    if group.size == 1 or tensor.numel() == 0:
        return Pending()
    return Pending([dist.reduce(tensor, group_dst=destination, group=group.handle, async_op=True)])


def broadcast(tensor: Tensor, source: int, group: Group) -> Pending:
    """Overwrite `tensor` with that of index `source`."""
    if group.size == 1 or tensor.numel() == 0:
        return Pending()
    return Pending([dist.broadcast(tensor, group=group.handle, group_src=source, async_op=True)])


def all_gather_into(full: Tensor, shard: Tensor, group: Group) -> Pending:
    """Fill `full` with every rank's `shard` in group order. Sends (p-1)/p of `full`'s bytes.

    Args:
        full: Contiguous, p times the elements of `shard`. `shard` may be its own part of `full`.
        shard: Contiguous; same shape and dtype on every rank.
        group: Who takes part.
    """
    parts = full.view(group.size, -1)
    own = parts[group.rank]
    if own.data_ptr() != shard.data_ptr():
        own.copy_(shard.reshape(-1))
    if group.size == 1 or full.numel() == 0:
        return Pending()
    if full.is_cuda:
        return Pending([dist.all_gather_into_tensor(full, own, group.handle, async_op=True)])
    peers = _peers(group)
    return exchange([(own, ahead) for ahead, _ in peers], [(parts[behind], behind) for _, behind in peers], group)


def reduce_scatter_into(shard: Tensor, full: Tensor, group: Group, staging: Tensor | None = None) -> Pending:
    """Fill `shard` with this rank's part of the sum of every rank's `full`. Sends (p-1)/p of `full`'s bytes.

    The parts are added in an order that depends on the rank that owns them alone, so repeated runs agree
    bitwise.

    Args:
        shard: Contiguous; overwritten when waited for. It may be this rank's own part of `full`.
        full: Contiguous, p times the elements of `shard`.
        group: Who takes part.
        staging: Room for what arrives, with at least `full.numel() - shard.numel()` elements; made where left
            out.
    """
    if group.size == 1 or full.numel() == 0:
        if shard.data_ptr() != full.data_ptr():
            shard.copy_(full.view_as(shard))
        return Pending()
    if full.is_cuda:
        return Pending([dist.reduce_scatter_tensor(shard, full, group=group.handle, async_op=True)])
    parts = full.view(group.size, -1)
    count = parts.shape[1]
    room = full.new_empty(full.numel() - count) if staging is None else staging[: full.numel() - count]
    arrivals = room.view(group.size - 1, count)
    peers = _peers(group)
    sends = [(parts[ahead], ahead) for ahead, _ in peers]
    receives = [(arrivals[k], behind) for k, (_, behind) in enumerate(peers)]
    travel = exchange(sends, receives, group)
    return Pending([], lambda: _sum_arrivals(travel, shard.view(-1), parts[group.rank], arrivals))


def _sum_arrivals(travel: Pending, shard: Tensor, own: Tensor, arrivals: Tensor) -> None:
    travel.wait()
    torch.add(own, arrivals[0], out=shard)
    for arrival in arrivals[1:]:
        shard.add_(arrival)


def all_to_all_into(
    output: Tensor,
    tensor: Tensor,
    group: Group,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
) -> Pending:
    """Send each rank its block of rows of `tensor`, and fill `output` with the blocks that come, in group order.

    Args:
        output: Contiguous; `sum(output_sizes)` rows.
        tensor: Contiguous; `sum(input_sizes)` rows.
        group: Who takes part.
        output_sizes: Rows that come from each index; equal blocks where left out.
        input_sizes: Rows that go to each index; equal blocks where left out.

    Raises:
        ValueError: Blocks are to be equal but the rows do not divide by the group's size.
    """
    outgoing = tensor.split(_block_sizes(tensor, group, input_sizes))
    incoming = output.split(_block_sizes(output, group, output_sizes))
    incoming[group.rank].copy_(outgoing[group.rank])
    if group.size == 1:
        return Pending()
    if tensor.is_cuda:
        sizes = [[block.shape[0] for block in blocks] for blocks in (incoming, outgoing)]
        return Pending([dist.all_to_all_single(output, tensor, *sizes, group=group.handle, async_op=True)])
    peers = _peers(group)
    sends = [(outgoing[ahead], ahead) for ahead, _ in peers]
    return exchange(sends, [(incoming[behind], behind) for _, behind in peers], group)


def _block_sizes(tensor: Tensor, group: Group, sizes: Sequence[int] | None) -> list[int]:
    if sizes is not None:
        return list(sizes)
    if tensor.shape[0] % group.size:
        raise ValueError(f"{tensor.shape[0]} rows do not divide by {group.size} ranks; give the sizes of the blocks")
    return [tensor.shape[0] // group.size] * group.size


def _peers(group: Group) -> list[tuple[int, int]]:
    """Whom to send to and to receive from, step by step: each step pairs every rank with another one."""
    return [((group.rank + step) % group.size, (group.rank - step) % group.size) for step in range(1, group.size)]


def all_gather(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return every rank's `tensor`, joined along `dim` in group order."""
    if group.size == 1:
        return tensor
    full = tensor.new_empty(group.size, *tensor.shape)
    all_gather_into(full, tensor.contiguous(), group).wait()
    return full.flatten(0, 1) if dim == 0 else torch.cat(tuple(full), dim)


def reduce_scatter(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return this rank's part along `dim` of the sum of every rank's `tensor`.

    Raises:
        ValueError: `dim` does not divide by the group's size.
    """
    if group.size == 1:
        return tensor
    blocks = chunk(tensor, group, dim)
    full = tensor.contiguous() if dim == 0 else torch.cat(blocks)
    shard = torch.empty_like(blocks[0], memory_format=torch.contiguous_format)
    reduce_scatter_into(shard, full, group).wait()
    return shard


def chunk(tensor: Tensor, group: Group, dim: int = 0) -> tuple[Tensor, ...]:
    """Split `tensor` along `dim` into one equal part a rank.

    Raises:
        ValueError: `dim` does not divide by the group's size.
    """
    if tensor.shape[dim] % group.size:
        raise ValueError(f"dimension {dim} of size {tensor.shape[dim]} does not divide by {group.size} ranks")
    return tensor.chunk(group.size, dim)
