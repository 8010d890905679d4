"""Two sides in turn, on the same ranks, after both were seen to compute the same numbers."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import comm
from reference.comm import Group
from tests.reference import ranks

Numbers = Mapping[str, Tensor]
Step = Callable[[], Numbers]
"""One training step, from inputs to gradients or new parameters; what it returns is what both sides must agree on."""

Sides = tuple[Step, Step]
"""Ours, and the native peer's."""

ROUNDS = 41  # fewer leave an interval that is wider than what is to be told apart
MOST = 1.00
MOST_UPPER = 1.05
_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of every round on both sides (of the slowest rank), and the largest relative difference of numbers."""

    name: str
    peer: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    difference: float

    @property
    def ratio(self) -> float:
        """Ratio of medians, ours over theirs."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def interval(self) -> tuple[float, float]:
        """The middle 95 % of the ratio, by resampling pairs of rounds (Efron 1979, the bootstrap)."""
        draw = random.Random(0)
        pairs = list(zip(self.ours, self.theirs, strict=True))
        found = []
        for _ in range(_RESAMPLES):
            ours, theirs = zip(*draw.choices(pairs, k=len(pairs)), strict=True)
            found.append(statistics.median(ours) / statistics.median(theirs))
        found.sort()
        return found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES) - 1]

    @property
    def verdict(self) -> str:
        """Return `ok` or `over`."""
        return "ok" if self.ratio <= MOST and self.interval[1] <= MOST_UPPER else "over"


def race(name: str, peer: str, make: Callable[[Group], Sides], world_size: int, rounds: int = ROUNDS) -> Result:
    """Run a benchmark on forked ranks."""
    by_rank = ranks.run(world_size, _race, make, rounds, timeout_s=300)
    ours, theirs = (tuple(max(times) for times in zip(*(r[side] for r in by_rank), strict=True)) for side in (0, 1))
    return Result(name, peer, ours, theirs, max(found[2] for found in by_rank))


def _race(group: Group, make: Callable[[Group], Sides], rounds: int) -> tuple[list[float], list[float], float]:
    sides = make(group)
    difference = _difference(*(side() for side in sides))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):  # the first round warms up
        for side in (0, 1) if number % 2 else (1, 0):
            comm.barrier(group)
            began = time.perf_counter()
            sides[side]()
            spent = time.perf_counter() - began
            if number:
                times[side].append(spent)
    return *times, difference


def _difference(ours: Numbers, theirs: Numbers) -> float:
    """Return the largest difference relative to the largest number of its tensor."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"the two sides compute different things: {sorted(ours.keys() ^ theirs.keys())}")
    worst = 0.0
    for name, tensor in theirs.items():
        error = (ours[name].detach().double() - tensor.detach().double()).abs().max()
        worst = max(worst, float(error / tensor.abs().max().clamp(min=torch.finfo(torch.float32).tiny)))
    return worst
