"""1F1B: a few forwards to fill the pipeline, then one forward and one backward in turn, then the rest of the backwards.

Bytes sent per rank: 2 b s h e a boundary a microbatch, as GPipe.
Memory: rank r keeps the activations of min(m, p - r) microbatches, however many there are: that is its gain over GPipe.
Bubble: (p-1)/(m+p-1), as GPipe.
Paper: Narayanan et al. 2019, "PipeDream", section 3.2; the flushing form: Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.
"""

from .actions import Action, Kind, Placement, Schedule
from .checks import require_positive


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule. Fewer microbatches than ranks are fine: then it is GPipe's order.

    Raises:
        ValueError: A number is less than 1.
    """
    require_positive(num_ranks, num_microbatches)
    ranks = tuple(_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("1f1b", num_microbatches, 1, Placement.LOOP, ranks)


def _rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    warm_up = min(num_ranks - rank - 1, num_microbatches)
    forwards = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(Kind.BACKWARD, rank, microbatch) for microbatch in range(num_microbatches)]
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return (*actions, *backwards[num_microbatches - warm_up :])
