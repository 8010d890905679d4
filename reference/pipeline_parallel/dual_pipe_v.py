"""DualPipe-V: two chunks a rank laid out as a V, so that forwards of one chunk overlap backwards of the other.

Bytes sent per rank: twice those of 1F1B, since a microbatch passes every rank twice; the turn of the V is local.
Memory: at most 2p + 1 chunk activations a rank, each half a stage's; parameters once (DualPipe holds them twice).
Bubble: (p-1)(F&B + B - 3W) as published, where F&B is one forward and one backward that run as a single unit; run one
after the other, as here, a stage need not wait for the whole unit, and it is (p-1)(F + I - W) or, at F = I = W = 1,
(p-1) of 6m + (p-1) by logical clock.
Paper: DeepSeek-AI 2024, DeepSeek-V3 technical report, section 3.2.1 (DualPipe), and its cut-in-half V form, which
Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4, call ZB-V.
"""

from collections.abc import Iterator

from .actions import Action, Kind, Placement, Schedule, stage_of
from .checks import require_positive


class _Rank:
    """Writes one rank's actions, counting for each chunk which microbatch is next for each kind of work."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._stages = [stage_of(rank, chunk, num_ranks, Placement.VEE) for chunk in (0, 1)]
        self._next = {(kind, chunk): 0 for kind in (Kind.FORWARD, Kind.BACKWARD) for chunk in (0, 1)}
        self._waiting: list[tuple[int, int]] = []  # (chunk, microbatch) whose weights' gradients are still owed
        self.actions: list[Action] = []

    def forward(self, chunk: int) -> None:
        self.actions.append(Action(Kind.FORWARD, self._stages[chunk], self._take(Kind.FORWARD, chunk)))

    def backward(self, chunk: int, *, split: bool = False) -> None:
        microbatch = self._take(Kind.BACKWARD, chunk)
        if split:
            self._waiting.append((chunk, microbatch))
        kind = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
        self.actions.append(Action(kind, self._stages[chunk], microbatch))

    def weight(self) -> None:
        chunk, microbatch = self._waiting.pop(0)
        self.actions.append(Action(Kind.BACKWARD_WEIGHT, self._stages[chunk], microbatch))

    def _take(self, kind: Kind, chunk: int) -> int:
        microbatch = self._next[kind, chunk]
        self._next[kind, chunk] += 1
        return microbatch


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the DualPipe-V schedule.

    Raises:
        ValueError: A number is less than 1, or there are fewer than 2p microbatches.
    """
    require_positive(num_ranks, num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"DualPipe-V on {num_ranks} ranks needs at least {2 * num_ranks} microbatches, got {num_microbatches}"
        )
    ranks = tuple(tuple(_actions(rank, num_ranks, num_microbatches)) for rank in range(num_ranks))
    return Schedule("dual-pipe-v", num_microbatches, 2, Placement.VEE, ranks)


def _actions(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    line = _Rank(rank, num_ranks)
    below = num_ranks - rank - 1
    _fill(line, rank, below)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):  # the steady state
        line.forward(0)
        line.backward(1)
        line.forward(1)
        line.backward(0)
    _drain(line, rank, below)
    return iter(line.actions)


def _fill(line: _Rank, rank: int, below: int) -> None:
    for _ in range(2 * below):
        line.forward(0)
    for _ in range(rank + 1):
        line.forward(0)
        line.forward(1)
    for _ in range(below):
        line.backward(1, split=True)
        line.weight()
        line.forward(1)


def _drain(line: _Rank, rank: int, below: int) -> None:
    for _ in range(below):
        line.backward(1)
        line.forward(1)
        line.backward(0)
    half = (rank + 1) // 2
    for step in range(rank + 1):
        # In the second half the pipeline drains, and weights' gradients are kept to fill what would be idle.
        line.backward(1, split=(step >= half and rank % 2 == 1) or step > half)
        line.backward(0, split=step >= half)
    for _ in range(below):
        line.weight()
        line.backward(0, split=True)
    while line._waiting:
        line.weight()
