"""Checks that a schedule can run, and measures it by a logical clock.

A schedule is valid when every virtual stage does every microbatch's forward once, and its backward once (whole, or
input then weights), each on the rank that holds the stage, and when no rank waits for ever.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .actions import Action, Kind, Schedule

UNIT_COSTS: Mapping[Kind, float] = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}
"""F = B_input = W = 1, the unit in which papers state bubbles."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything happens.

    Attributes:
        ends: For each rank, when each of its actions ends, in the order of its schedule.
        makespan: When the last one ends.
        busy: For each rank the time in which it computes.
    """

    ends: tuple[tuple[float, ...], ...]
    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The idle share of the ranks' time: 1 - busy / makespan, averaged over ranks."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def validate(schedule: Schedule) -> None:
    """Raise `ValueError` where the schedule is wrong, and say which action is missing, double, misplaced or stuck."""
    _check_counts(schedule)
    _check_places(schedule)
    timeline(schedule)


def timeline(schedule: Schedule, costs: Mapping[Kind, float] = UNIT_COSTS, latency: float = 0.0) -> Timeline:
    """Run the schedule by a logical clock: an action starts when its rank is free and what it needs has arrived.

    Args:
        schedule: What to run.
        costs: Duration of each kind of action.
        latency: Time that a message between two ranks takes.

    Raises:
        ValueError: Every rank waits for another: a deadlock.
    """
    position = [0] * schedule.num_ranks
    clock = [0.0] * schedule.num_ranks
    ends: list[list[float]] = [[] for _ in range(schedule.num_ranks)]
    done: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                start = _start(action, rank, schedule, done, latency)
                if start is None:
                    break
                clock[rank] = max(clock[rank], start) + costs[action.kind]
                done[action] = clock[rank]
                ends[rank].append(clock[rank])
                position[rank] += 1
                moved = True
    stuck = [actions[at] for actions, at in zip(schedule.ranks, position, strict=True) if at < len(actions)]
    if stuck:
        raise ValueError(f"schedule {schedule.name} deadlocks: waiting are {', '.join(map(str, stuck))}")
    busy = tuple(sum(costs[action.kind] for action in actions) for actions in schedule.ranks)
    return Timeline(tuple(map(tuple, ends)), max(clock), busy)


def live_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank, the most chunk activations that it keeps at once.

    A forward's activations are kept until the weights' gradients that need them are done.
    """
    return tuple(_peak(actions) for actions in schedule.ranks)


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return what must be done before an action; for a backward either form of the later stage's counts."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return (Action(Kind.FORWARD, stage - 1, microbatch),) if stage else ()
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (Action(Kind.BACKWARD_INPUT, stage, microbatch),)
    own = Action(Kind.FORWARD, stage, microbatch)
    return (own, Action(Kind.BACKWARD, stage + 1, microbatch)) if stage < num_stages - 1 else (own,)


def _start(action: Action, rank: int, schedule: Schedule, done: Mapping[Action, float], latency: float) -> float | None:
    """Return when everything that an action needs has arrived, or None while something has not been done."""
    start = 0.0
    for needed in needs(action, schedule.num_stages):
        end = done.get(needed)
        if end is None and needed.kind is Kind.BACKWARD:
            end = done.get(Action(Kind.BACKWARD_INPUT, needed.stage, needed.microbatch))
        if end is None:
            return None
        travel = latency if schedule.rank_of(needed.stage) != rank else 0.0
        start = max(start, end + travel)
    return start


def _peak(actions: Iterable[Action]) -> int:
    live = peak = 0
    for action in actions:
        live += action.kind is Kind.FORWARD
        peak = max(peak, live)
        live -= action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return peak


def _check_counts(schedule: Schedule) -> None:
    counted = Counter(action for actions in schedule.ranks for action in actions)
    for action, count in counted.items():
        if count > 1:
            raise ValueError(f"schedule {schedule.name} does {action} {count} times, expected once")
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            done = {kind for kind in Kind if Action(kind, stage, microbatch) in counted}
            if done not in ({Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}):
                found = "".join(sorted(done)) or "nothing"
                raise ValueError(
                    f"schedule {schedule.name} does {found} for stage {stage}, microbatch {microbatch}; "
                    "expected F and B, or F, I and W"
                )
    extra = len(counted) - sum(1 for action in counted if _known(action, schedule))
    if extra:
        raise ValueError(f"schedule {schedule.name} has {extra} actions outside its stages or microbatches")


def _known(action: Action, schedule: Schedule) -> bool:
    return 0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches


def _check_places(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            home = schedule.rank_of(action.stage)
            if home != rank:
                raise ValueError(f"schedule {schedule.name} does {action} on rank {rank}; its stage is on {home}")
