"""Zero bubble (ZB-H1, torch's ZB1P): the weights' gradients wait until a rank would be idle.

The next stage waits only for the gradient of its output, so a backward is split: the input's gradient at once, the
weights' gradients later, in what was the bubble.

Bytes sent per rank: 2 b s h e a boundary a microbatch, as 1F1B.
Memory: every rank keeps min(m, p) microbatches alive, where 1F1B has that on rank 0 alone.
Bubble: (p-1)(F + B - 2W) of m (F + B) with B the full backward: a third of 1F1B's at F = W = B/2.
Paper: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2 (ZB-H1).
"""

from .actions import Action, Kind, Placement, Schedule
from .checks import require_positive


def zero_bubble(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule.

    Raises:
        ValueError: A number is less than 1.
    """
    require_positive(num_ranks, num_microbatches)
    ranks = tuple(_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("zero-bubble", num_microbatches, 1, Placement.LOOP, ranks)


def _rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """1F1B's order, with each weight gradient `rank` microbatches behind its input gradient.

    Rank r has r microbatches fewer in flight than rank 0; it may as well keep r of them waiting for their weights'
    gradients, and at the end it has r of those to fill the time in which it waits for gradients.
    """
    warm_up = min(num_ranks - rank - 1, num_microbatches)
    actions = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(num_microbatches):
        if microbatch + warm_up < num_microbatches:
            actions.append(Action(Kind.FORWARD, rank, microbatch + warm_up))
        actions.append(Action(Kind.BACKWARD_INPUT, rank, microbatch))
        if microbatch >= rank:
            actions.append(Action(Kind.BACKWARD_WEIGHT, rank, microbatch - rank))
    first_left = max(0, num_microbatches - rank)
    left = [Action(Kind.BACKWARD_WEIGHT, rank, microbatch) for microbatch in range(first_left, num_microbatches)]
    return (*actions, *left)
