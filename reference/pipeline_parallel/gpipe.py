"""Naive pipelining and GPipe: all forwards, then all backwards.

Bytes sent per rank: 2 b s h e a boundary a microbatch (activations one way, their gradients the other).
Memory: GPipe keeps the activations of all m microbatches; naive pipelining of one.
Bubble: naive (p-1)/p, since one rank works at a time; GPipe (p-1)/(m+p-1).
Paper: Huang et al. 2019, "GPipe", section 2.3.
"""

from .actions import Action, Kind, Placement, Schedule
from .checks import require_positive


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule that takes each microbatch down and up before the next begins.

    Raises:
        ValueError: A number is less than 1.
    """
    require_positive(num_ranks, num_microbatches)
    ranks = tuple(
        tuple(
            Action(kind, rank, microbatch)
            for microbatch in range(num_microbatches)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        for rank in range(num_ranks)
    )
    return Schedule("naive", num_microbatches, 1, Placement.LOOP, ranks)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return GPipe's schedule. Backwards go in the order of the forwards, so gradients arrive as they are needed.

    Raises:
        ValueError: A number is less than 1.
    """
    require_positive(num_ranks, num_microbatches)
    ranks = tuple(
        tuple(
            Action(kind, rank, microbatch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_microbatches, 1, Placement.LOOP, ranks)
