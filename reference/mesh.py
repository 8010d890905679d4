"""Where every rank stands: one frozen record of five axes, and nothing else.

The world is the product of the five sizes. The *layout order*, innermost first, is tp, cp, ep, pp, dp, so
that neighbouring ranks share a node: tensor parallelism, which communicates inside every layer, gets the
fastest links; pipeline stages lie across nodes; data parallelism, which communicates once a step, lies
outermost (the layout of GPT-3 and of Megatron-LM, Narayanan et al. 2021, section 3).

A mesh holds no process groups and knows nothing of `torch.distributed`: `comm.Groups` makes the groups that a
mesh names. It depends on nothing but its arguments, so two layouts can live in one program.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Final

LAYOUT: Final = ("tp", "cp", "ep", "pp", "dp")
"""The axes from the innermost (neighbouring ranks) to the outermost."""

DENSE: Final = ("cp", "ep", "dp")
"""The axes over which the gradients of dense parameters are partial sums: each has other tokens."""

EXPERT: Final = ("cp", "dp")
"""The same for the parameters of experts: along `ep` lie other experts."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the five axes.

    Attributes:
        tp: Tensor parallel size; sequence parallelism (Megatron) shares this axis.
        cp: Context parallel size.
        ep: Expert parallel size; for dense parameters the axis is one more data axis.
        dp: Data parallel size (ZeRO shards lie here).
        pp: Pipeline parallel size, in stages.

    Raises:
        ValueError: A size is less than one.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in LAYOUT:
            if self.size(axis) < 1:
                raise ValueError(f"mesh axis {axis} has size {self.size(axis)}; every axis needs at least 1")

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of the five sizes."""
        return self.size(*LAYOUT)

    def size(self, *axes: str) -> int:
        """Return the product of the sizes of `axes`."""
        return prod(getattr(self, axis) for axis in _known(axes))

    def require_world(self, world_size: int) -> None:
        """Raise `ValueError` unless the five sizes multiply to `world_size`."""
        if self.world_size != world_size:
            sizes = " x ".join(f"{axis} {self.size(axis)}" for axis in LAYOUT)
            raise ValueError(
                f"mesh {sizes} has {self.world_size} ranks but the world has {world_size}; "
                f"choose sizes whose product is {world_size}"
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where `rank` stands on each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not on a mesh of {self.world_size} ranks")
        place: dict[str, int] = {}
        for axis in LAYOUT:
            rank, place[axis] = divmod(rank, self.size(axis))
        return place

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank that stands at `coordinates`; an axis left out counts as 0."""
        _known(coordinates)
        rank, stride = 0, 1
        for axis in LAYOUT:
            place = coordinates.get(axis, 0)
            if not 0 <= place < self.size(axis):
                raise ValueError(f"{axis} coordinate {place} is outside an axis of size {self.size(axis)}")
            rank += place * stride
            stride *= self.size(axis)
        return rank

    def ranks(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, in ascending order, itself included.

        Ascending ranks are ascending coordinates, inner axes fastest, so a rank's index in the group of one
        axis is its coordinate there.
        """
        here = self.coordinates(rank)
        wanted = set(_known(axes))
        fixed = {axis: place for axis, place in here.items() if axis not in wanted}
        members = [0]
        stride = 1
        for axis in LAYOUT:
            places = (fixed[axis],) if axis in fixed else range(self.size(axis))
            members = [member + place * stride for place in places for member in members]
            stride *= self.size(axis)
        return tuple(members)

    def partitions(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return every group along `axes`: together they hold each rank once."""
        groups = {self.ranks(rank, *axes) for rank in range(self.world_size)}
        return tuple(sorted(groups))

    def peer(self, rank: int, axis: str, step: int) -> int:
        """Return the rank `step` places further along `axis`, going round at the end."""
        place = self.coordinates(rank)
        place[axis] = (place[axis] + step) % self.size(axis)
        return self.rank_at(**place)


def _known(axes: Iterable[str]) -> tuple[str, ...]:
    axes = tuple(axes)
    for axis in axes:
        if axis not in LAYOUT:
            raise ValueError(f"{axis!r} is not an axis of the mesh; the axes are {', '.join(LAYOUT)}")
    return axes
