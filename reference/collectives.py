"""Collectives from nothing but sends and receives.

Each rank talks to its neighbours in a ring, so every link is busy at every step, and no rank is a centre.

| function | steps | bytes sent per rank (n = bytes of the whole tensor) |
|---|---|---|
| `reduce_scatter` | p - 1 | (p-1)/p n |
| `all_gather` | p - 1 | (p-1)/p n |
| `all_reduce` | 2(p - 1) | 2(p-1)/p n: independent of p for large p |
| `all_to_all` | p - 1 | what leaves: (p-1)/p n for equal blocks |
| `broadcast` | ceil(log2 p) | at most ceil(log2 p) n from the source; (p-1) n over all ranks |

Memory: the tensor, and one chunk of n/p. Sizes that do not divide by p make chunks that differ by one element; bytes
are then exact summed over ranks, and per rank within one chunk.
Bubble: none; every rank sends and receives at every step (broadcast: ranks join as the tree grows).
Paper: Patarasuk and Yuan 2009 (ring all-reduce is bandwidth optimal); Thakur et al. 2005 (the others).
"""

from collections.abc import Sequence

from torch import Tensor

from . import comm
from .comm import Group


def chunks_of(tensor: Tensor, group: Group) -> list[Tensor]:
    """Return p views of a contiguous tensor, flattened, whose sizes differ by at most one element."""
    return list(tensor.view(-1).tensor_split(group.size))


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """Sum over the group so that each rank ends with its own chunk of the sum.

    A chunk starts its journey one place ahead of its owner, goes once round the ring, and each rank adds its own part
    as it passes; after p - 1 steps it arrives at its owner.

    Args:
        tensor: Contiguous; overwritten with partial sums.
        group: Who takes part.

    Returns:
        This rank's chunk, a view of `tensor`.
    """
    chunks = chunks_of(tensor, group)
    received = tensor.new_empty(chunks[0].numel())  # the first chunk is never smaller than another
    for step in range(group.size - 1):
        leaves = chunks[(group.rank - step - 1) % group.size]
        arrives = chunks[(group.rank - step - 2) % group.size]
        part = received[: arrives.numel()]
        comm.ring_shift(leaves, part, group).wait()
        arrives.add_(part)
    return chunks[group.rank]


def all_gather(tensor: Tensor, group: Group) -> None:
    """Fill `tensor` with every rank's chunk: each rank passes on what it received in the step before.

    Args:
        tensor: Contiguous; this rank's own chunk of it is set, the rest is overwritten.
        group: Who takes part.
    """
    chunks = chunks_of(tensor, group)
    for step in range(group.size - 1):
        leaves = chunks[(group.rank - step) % group.size]
        arrives = chunks[(group.rank - step - 1) % group.size]
        comm.ring_shift(leaves, arrives, group).wait()


def all_reduce(tensor: Tensor, group: Group) -> None:
    """Sum `tensor` (contiguous) over the group, in place: reduce-scatter, then all-gather."""
    reduce_scatter(tensor, group)
    all_gather(tensor, group)


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Group) -> None:
    """Send `inputs[i]` to rank i, and fill `outputs[i]` with what rank i sends here.

    In step s every rank sends s places ahead and receives from s places behind, so no rank is ever sent to twice.

    Args:
        outputs: One contiguous tensor a rank, of any size; each is overwritten.
        inputs: One contiguous tensor a rank; its size is that which the receiver expects.
        group: Who takes part.

    Raises:
        ValueError: There is not one input and one output a rank.
    """
    if not len(outputs) == len(inputs) == group.size:
        raise ValueError(
            f"{group.size} ranks need as many tensors, not {len(inputs)} inputs and {len(outputs)} outputs"
        )
    outputs[group.rank].copy_(inputs[group.rank])
    for step in range(1, group.size):
        ahead, behind = (group.rank + step) % group.size, (group.rank - step) % group.size
        comm.exchange([(inputs[ahead], ahead)], [(outputs[behind], behind)], group).wait()


def broadcast(tensor: Tensor, source: int, group: Group) -> None:
    """Overwrite `tensor` (contiguous) with that of index `source`, along a binomial tree.

    Counted from the source, in the step of distance d every rank below d has the tensor and sends it d places on.
    """
    place = (group.rank - source) % group.size
    distance = 1
    while distance < group.size:
        peer = place + distance if place < distance else place - distance
        if place < distance and peer < group.size:
            comm.send(tensor, (peer + source) % group.size, group)
        elif distance <= place < 2 * distance:
            comm.receive(tensor, (peer + source) % group.size, group)
        distance *= 2
