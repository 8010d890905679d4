"""Bugs that public codes really had, put back in one by one: the comparison with serial training must see each.

Each bug is a function that changes the reference inside the ranks' own processes, before training. The run itself must
go through (these bugs are silent), and the numbers must differ from serial training's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from reference import comm, finalize, loss
from reference.comm import Group, Pending
from reference.data_parallel import ddp, zero1, zero2
from reference.data_parallel.ddp import Bucket, GradientReducer
from reference.data_parallel.shards import Shard, ShardedOptimizer
from reference.data_parallel.units import Unit
from reference.data_parallel.zero3 import Zero3
from tests.reference import ranks
from tests.reference.data_parallel import strategies
from tests.reference.data_parallel.strategies import STRATEGIES, assert_matches, expected
from tests.reference.data_parallel.test_ddp import CHOICES, compare, parallel_gradients, serial_gradients
from tests.reference.data_parallel.test_traffic import gather_order
from tests.reference.equivalence import root_mean_square
from tests.reference.training import Problem, Trajectory, parameters_of

WORLD = 3


def patched(target: object, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace an attribute for the rest of this (rank's) process."""
    mock.patch.object(target, name, wrap(getattr(target, name))).start()


def scaled_gradients(factor: Callable[[Group], float]) -> Callable[[], None]:
    """Multiply every sum over ranks by a factor."""

    def bug() -> None:
        def wrap(settle: Any) -> Any:
            def wrong(self: GradientReducer, bucket: Bucket) -> None:
                settle(self, bucket)
                bucket.flat.mul_(factor(self.group))

            return wrong

        patched(GradientReducer, "_settle", wrap)

    return bug


def local_divisor() -> None:
    """Each rank divides by its own valid tokens, and gradients are averaged: a mean of means."""
    patched(loss, "global_count", lambda _: lambda targets, group: loss.valid_count(torch.stack(targets)) * group.size)


def mean_of_microbatch_means() -> None:
    """Each microbatch divides by its own valid tokens, and by the number of microbatches."""
    original = strategies.share_of_loss

    def wrong(model: Any, batch: tuple[Tensor, Tensor], _: Tensor, microbatches: int) -> Tensor:
        own = loss.global_count(batch[1], comm.world())
        return original(model, batch, own * microbatches, microbatches)

    patched(strategies, "share_of_loss", lambda _: wrong)


def no_division() -> None:
    """Gradients are too large by the number of valid tokens."""
    patched(loss, "scaled", lambda _: lambda total, count, auxiliary=None, microbatches=1: total)


def moving_average() -> None:
    """Scaling inside accumulation: each microbatch halves what was there."""

    def wrap(place: Any) -> Any:
        def wrong(self: GradientReducer, bucket: Bucket, view: Tensor, parameter: Parameter) -> None:
            place(self, bucket, view, parameter)
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]

        return wrong

    patched(GradientReducer, "_place", wrap)


def only_the_last_microbatch() -> None:
    """A microbatch's shard overwrites the ones before."""

    def wrong(self: Shard, summed: Tensor) -> None:
        self.gradient = summed

    patched(Shard, "add_gradient", lambda _: wrong)


def accumulation_cleared() -> None:
    """The bucket is prepared anew for each microbatch, so what `no_sync` had accumulated is gone."""

    def wrap(place: Any) -> Any:
        def wrong(self: GradientReducer, bucket: Bucket, view: Tensor, parameter: Parameter) -> None:
            if parameter.grad is view and self._syncing:
                view.zero_()
            place(self, bucket, view, parameter)

        return wrong

    patched(GradientReducer, "_place", wrap)


def sync_flag_ignored() -> None:
    """The first microbatch already synchronises; what the later ones add stays local."""

    def wrong(self: GradientReducer, bucket: Bucket, view: Tensor, parameter: Parameter) -> None:
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._launch(bucket)
                bucket.pending.wait()  # type: ignore[union-attr]

    patched(GradientReducer, "_arrived", lambda _: wrong)


def averaged_where_summed() -> None:
    scaled_gradients(lambda group: 1 / group.size)()


def averaged_twice() -> None:
    scaled_gradients(lambda group: 1 / group.size**2)()


def scaled_by_the_group() -> None:
    scaled_gradients(lambda group: float(group.size))()


def buffers_alias() -> None:
    """Parameters are gathered into the memory of the gradient's bucket."""

    def wrap(initialise: Any) -> Any:
        def wrong(self: zero1.Zero1, *arguments: Any, **options: Any) -> None:
            initialise(self, *arguments, **options)
            for bucket, flat in zip(self.buckets, self.flats, strict=True):
                bucket.flat.set_(flat.untyped_storage(), 0, flat.shape)
                for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                    view.set_(parameter.untyped_storage(), parameter.storage_offset(), parameter.shape)

        return wrong

    patched(zero1.Zero1, "__init__", wrap)


def norm_over_unreduced() -> None:
    """The norm is that of this rank's shard alone."""
    patched(ShardedOptimizer, "norm", lambda _: lambda self: finalize.sum_of_squares(self.gradients()).sqrt())


def norm_of_mean_squares() -> None:
    """Squares of disjoint shards are averaged, as if they were replicas."""
    patched(ShardedOptimizer, "norm", lambda norm: lambda self: norm(self) / self.group.size**0.5)


def unreduced_shard() -> None:
    """Each rank keeps its part of its own gradient."""

    def wrong(self: zero1.Zero1, bucket: Bucket) -> Pending:
        return Pending()

    patched(zero1.Zero1, "_reduce", lambda _: wrong)


def sum_before_it_arrives() -> None:
    """The shard is taken before the messages that it is the sum of."""

    def wrong(self: zero2.Zero2, bucket: Bucket) -> Pending:
        self._in_flight.append(bucket)
        self._sums[bucket] = self._own_part(bucket.flat).clone()
        return comm.reduce_scatter_into(torch.empty_like(self._sums[bucket]), bucket.flat, self.group)

    patched(zero2.Zero2, "_reduce", lambda _: wrong)


def stale_parameters() -> None:
    """New parameters are not gathered: each rank goes on with its own part alone."""
    patched(zero1.Zero1, "gather", lambda _: lambda self: None)


def stale_units() -> None:
    """A gathered unit stays, so the next forward pass uses last step's parameters."""
    patched(Unit, "free", lambda free: lambda self: None if self.is_live and self._gathering is None else free(self))


def broadcast_left_out() -> None:
    """Ranks begin with their own weights."""
    patched(ddp, "broadcast_from_first", lambda _: lambda tensors, group: None)


@dataclass(frozen=True)
class Bug:
    """A bug, the strategy it lived in, and how many microbatches it takes to matter."""

    put_in: Callable[[], None]
    strategy: str = "ddp"
    microbatches: int = 1


BUGS = [
    Bug(local_divisor),
    Bug(mean_of_microbatch_means, microbatches=3),
    Bug(no_division),
    Bug(moving_average, microbatches=3),
    Bug(only_the_last_microbatch, "zero2", 3),
    Bug(only_the_last_microbatch, "zero3", 3),
    Bug(accumulation_cleared, microbatches=3),
    Bug(accumulation_cleared, "zero1", 3),
    Bug(sync_flag_ignored, microbatches=3),
    Bug(averaged_where_summed),
    Bug(averaged_twice, "zero1"),
    Bug(scaled_by_the_group),
    Bug(buffers_alias, "zero1"),
    Bug(norm_over_unreduced, "zero1"),
    Bug(norm_over_unreduced, "zero3"),
    Bug(norm_of_mean_squares, "zero2"),
    Bug(unreduced_shard, "zero1"),
    Bug(sum_before_it_arrives, "zero2"),
    Bug(stale_parameters, "zero1"),
    Bug(stale_units, "zero3"),
    Bug(broadcast_left_out),
]


def train_with(group: Group, problem: Problem, bug: Bug) -> Trajectory:
    bug.put_in()
    return strategies.train(group, problem, STRATEGIES[bug.strategy])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.put_in.__name__}-{bug.strategy}")
def test_serial_training_tells_the_bug_apart(bug: Bug) -> None:
    problem = Problem(microbatches=bug.microbatches, max_norm=0.5)
    want = expected(problem)
    results = ranks.run(WORLD, train_with, problem, bug)
    with pytest.raises(AssertionError, match=r"off by|not finite"):
        assert_all_match(results, want)


def assert_all_match(results: list[Trajectory], want: Trajectory) -> None:
    for got in results:
        assert_matches(got, want)


def misled(optimizer: str, bug: Callable[[], None]) -> float:
    """Return how far the bug leads the parameters astray, as a part of the way that they should have gone."""
    problem = Problem(optimizer=optimizer)
    want = expected(problem).parameters
    got = ranks.run(WORLD, train_with, problem, Bug(bug))[0].parameters
    start = parameters_of(problem.model())
    # the bias of keys has gradient zero, of whose rounding Adam makes whole steps
    names = [name for name in want if "qkv.bias" not in name]
    astray, way = (
        torch.cat([(one[name] - other[name]).reshape(-1) for name in names])
        for one, other in ((got, want), (want, start))
    )
    return root_mean_square(astray) / root_mean_square(way)


@pytest.mark.parametrize("bug", [averaged_where_summed, scaled_by_the_group])
def test_adam_alone_would_hide_a_wrong_scale(bug: Callable[[], None]) -> None:
    """Why gradients and SGD are compared too."""
    assert misled("adamw_small_eps", bug) < 0.02
    assert misled("sgd", bug) > 0.3


class UnusedLeftOut(GradientReducer):
    """A parameter that this rank did not use is not reduced here: it diverges in silence."""

    def _settle(self, bucket: Bucket) -> None:
        had_gradient = {parameter for parameter in bucket.parameters if parameter.grad is not None}
        super()._settle(bucket)
        for parameter in bucket.parameters:
            if parameter not in had_gradient:
                parameter.grad = None


class UnusedCleared(GradientReducer):
    """A parameter without gradient in the last microbatch counts as unused, whatever `no_sync` accumulated."""

    def _fill_gaps(self, bucket: Bucket) -> None:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter in bucket.missing:
                view.zero_()


class UnusedAsZero(GradientReducer):
    """A parameter that nobody used gets a gradient of zeros, and so weight decay and momentum."""

    def _unused_everywhere(self) -> list[Parameter]:
        return []


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        (UnusedLeftOut, "right only on the first rank"),
        (UnusedCleared, "right only in the first microbatch"),
        (UnusedAsZero, "right nowhere"),
    ],
)
def test_bugs_with_unused_parameters_are_told_apart(kind: type[GradientReducer], choice: str) -> None:
    want = ranks.alone(serial_gradients, CHOICES[choice], WORLD)
    results = ranks.run(WORLD, parallel_gradients, CHOICES[choice], kind)
    with pytest.raises(AssertionError, match=r"off by|on one side only"):
        compare_all(results, want)


def compare_all(results: list[list[dict[str, Tensor]]], want: list[dict[str, Tensor]]) -> None:
    for got in results:
        compare(got, want)


def test_gathers_in_the_order_of_registration_would_hold_units_that_do_not_compute() -> None:
    def wrong(group: Group) -> tuple[list[str], int]:
        def registration_order(self: Zero3, unit: Unit, *_: Any) -> None:
            self._recording = [] if unit is self.root else self._recording
            self._recording.append(unit)
            unit.gather()
            if len(self._recording) < len(self.units):
                self.units[len(self._recording)].prefetch()

        patched(Zero3, "_before_forward", lambda _: registration_order)
        return gather_order(group)

    _, peak = ranks.run(2, wrong)[0]
    assert peak > 3
