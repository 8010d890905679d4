"""What a pipeline schedule is made of: actions, and the order in which each rank takes them.

A schedule is data. It is made by a pure function of (stages, microbatches, chunks), run by `runtime`, and checked by
`validate`; nobody else needs to know how it came about.

A model is cut into `num_ranks x chunks` *virtual stages*. Where `chunks` is 1, a virtual stage is a rank's stage.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is computed. A backward is either whole, or split in two that may lie apart."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of the input and of the weights together
    BACKWARD_INPUT = "I"  # only the gradient of the input: the stage before waits for it
    BACKWARD_WEIGHT = "W"  # only the gradients of the weights: nobody waits for them


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One computation of one microbatch on one virtual stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Return for example `F2.5`: forward of virtual stage 2, microbatch 5."""
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Placement(StrEnum):
    """On which rank a virtual stage lies."""

    LOOP = "loop"  # stage s on rank s mod p: a microbatch goes round and round
    VEE = "vee"  # down the ranks and up again: the first and the last stage share rank 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every rank, in order.

    Attributes:
        name: The algorithm.
        num_microbatches: Microbatches of one step.
        chunks: Virtual stages a rank.
        placement: Where virtual stages lie.
        ranks: For each rank its actions.
    """

    name: str
    num_microbatches: int
    chunks: int
    placement: Placement
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """The number of virtual stages."""
        return self.num_ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a virtual stage."""
        return rank_of(stage, self.num_ranks, self.placement)


def rank_of(stage: int, num_ranks: int, placement: Placement) -> int:
    """Return the rank that holds virtual stage `stage`."""
    lap, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if placement is Placement.VEE and lap % 2 else place


def stage_of(rank: int, chunk: int, num_ranks: int, placement: Placement) -> int:
    """Return the virtual stage that is chunk `chunk` of `rank`."""
    place = num_ranks - 1 - rank if placement is Placement.VEE and chunk % 2 else rank
    return chunk * num_ranks + place
