"""Interleaved 1F1B: each rank holds several smaller stages, so the pipeline fills v times sooner.

Bytes sent per rank: v times those of 1F1B, since a microbatch passes every rank v times.
Memory: rank r keeps min(v m, 2 (p - r - 1) + (v - 1) p + 1) chunk activations, each 1/v of a stage's.
Bubble: (p-1)/(v m + p - 1).
Paper: Narayanan et al. 2021, Megatron-LM, section 2.2 and figure 4.
"""

from .actions import Action, Kind, Placement, Schedule, stage_of
from .checks import require_positive


def interleaved_1f1b(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return the interleaved schedule.

    Raises:
        ValueError: A number is less than 1, or the microbatches do not divide by the ranks: the paper's order takes
            them in groups of p.
    """
    require_positive(num_ranks, num_microbatches, chunks)
    if num_microbatches % num_ranks:
        raise ValueError(
            f"interleaved 1F1B takes microbatches in groups of {num_ranks} (one a rank), and {num_microbatches} do not "
            f"divide by it; use {num_microbatches // num_ranks * num_ranks or num_ranks} or 1F1B"
        )
    ranks = tuple(_rank(rank, num_ranks, num_microbatches, chunks) for rank in range(num_ranks))
    return Schedule("interleaved-1f1b", num_microbatches, chunks, Placement.LOOP, ranks)


def _rank(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> tuple[Action, ...]:
    order = _order(num_ranks, num_microbatches, chunks)
    forwards = [Action(Kind.FORWARD, chunk * num_ranks + rank, microbatch) for chunk, microbatch in order]
    backwards = [
        Action(Kind.BACKWARD, stage_of(rank, chunks - 1 - chunk, num_ranks, Placement.LOOP), microbatch)
        for chunk, microbatch in order
    ]
    warm_up = min(2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks, len(order))
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return (*actions, *backwards[len(order) - warm_up :])


def _order(num_ranks: int, num_microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """Return (chunk, microbatch) in the order of the forwards: p microbatches through a chunk, then the next chunk."""
    return [
        (chunk, first + offset)
        for first in range(0, num_microbatches, num_ranks)
        for chunk in range(chunks)
        for offset in range(num_ranks)
    ]
