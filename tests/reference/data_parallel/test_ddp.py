"""DDP's promises beyond plain steps: unused parameters, `no_sync`, and misuse that says what to do."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from reference.comm import ALONE, Group
from reference.data_parallel.buckets import plan
from reference.data_parallel.ddp import DistributedDataParallel, GradientReducer
from reference.data_parallel.zero1 import Zero1
from reference.data_parallel.zero2 import Zero2
from tests.reference import ranks
from tests.reference.data_parallel.strategies import Linears
from tests.reference.equivalence import assert_equal_in_float64
from tests.reference.training import gradients_of, parameters_of, sgd

Choice = Callable[[int, int], str | None]
"""Which branch rank `r` takes in microbatch `m`: `left`, `right`, or None for neither."""

MICROBATCHES = 3

CHOICES: dict[str, Choice] = {
    "right only in the first microbatch": lambda _, m: "right" if m == 0 else "left",
    "right only on the first rank": lambda r, _: "right" if r == 0 else "left",
    "right nowhere": lambda _r, _m: "left",
    "right only on the last rank in the last microbatch": lambda r, m: "right" if (r, m) == (2, 2) else "left",
    "neither on the first rank": lambda r, _: None if r == 0 else "left",
}


class Branches(nn.Module):
    """A trunk, and two branches of which a pass uses at most one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = Linears([6, 6]), Linears([6, 5]), Linears([6, 5])

    def forward(self, x: Tensor, branch: str | None) -> Tensor:
        x = self.trunk(x)
        return x if branch is None else self.get_submodule(branch)(x)


def inputs(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randn(3 + rank, 6, generator=generator, dtype=torch.float64)


def serial_gradients(_: Group, choice: Choice, world_size: int) -> list[dict[str, Tensor]]:
    model, results = Branches(), []
    for _ in range(2):
        for rank in range(world_size):
            for microbatch in range(MICROBATCHES):
                model(inputs(rank, microbatch), choice(rank, microbatch)).square().sum().backward()
        results.append(gradients_of(model))
        model.zero_grad()
    return results


def parallel_gradients(
    group: Group, choice: Choice, kind: type[GradientReducer] = GradientReducer
) -> list[dict[str, Tensor]]:
    model, results = Branches(), []
    reducer = kind(model.parameters(), group, bucket_bytes=300, find_unused=True)
    for _ in range(2):
        for microbatch in range(MICROBATCHES):
            with nullcontext() if microbatch == MICROBATCHES - 1 else reducer.no_sync():
                model(inputs(group.rank, microbatch), choice(group.rank, microbatch)).square().sum().backward()
        reducer.finish()
        results.append(gradients_of(model))
        model.zero_grad()
    return results


def compare(got: Sequence[dict[str, Tensor]], want: Sequence[dict[str, Tensor]]) -> None:
    for have, expected in zip(got, want, strict=True):
        assert_equal_in_float64(have, expected, "gradient")


@pytest.mark.parametrize("name", CHOICES)
def test_unused_parameters_match_serial_under_no_sync(name: str) -> None:
    """A parameter that nobody used has no gradient at all, as in serial training."""
    want = ranks.alone(serial_gradients, CHOICES[name], 3)
    for got in ranks.run(3, parallel_gradients, CHOICES[name]):
        compare(got, want)


@pytest.mark.parametrize("kind", [GradientReducer, Zero1, Zero2])
def test_an_unused_parameter_is_an_error_that_says_what_to_do(kind: type[GradientReducer]) -> None:
    def leave_one_out(group: Group) -> str:
        model = Branches()
        options = () if kind is GradientReducer else (sgd,)
        reducer = kind(model.parameters(), group, *options)
        model(inputs(group.rank, 0), "left").sum().backward()
        with pytest.raises(RuntimeError, match="2 parameters had no gradient.*find_unused=True") as caught:
            reducer.finish()
        return str(caught.value)

    assert "(5, 6)" in ranks.run(2, leave_one_out)[0]


def test_where_the_forward_pass_runs_does_not_matter_to_no_sync() -> None:
    def forwards_first(group: Group, inside: bool) -> dict[str, Tensor]:
        model = Linears([6, 5])
        parallel = DistributedDataParallel(model, group)
        with parallel.no_sync() if inside else nullcontext():
            losses = [parallel(inputs(group.rank, m)).square().sum() for m in range(2)]
        with parallel.no_sync():
            losses[0].backward()
        losses[1].backward()
        parallel.finish()
        return gradients_of(model)

    def serial(_: Group) -> dict[str, Tensor]:
        model = Linears([6, 5])
        for rank in range(2):
            for microbatch in range(2):
                model(inputs(rank, microbatch)).square().sum().backward()
        return gradients_of(model)

    want = ranks.alone(serial)
    for inside in (False, True):
        for got in ranks.run(2, forwards_first, inside):
            assert_equal_in_float64(got, want, "gradient")


@pytest.mark.parametrize("forget", ["finish", "zero_grad"])
def test_adding_to_summed_gradients_is_an_error(forget: str) -> None:
    def twice(group: Group) -> None:
        model = Linears([6, 5])
        reducer = GradientReducer(model.parameters(), group)
        model(inputs(0, 0)).sum().backward()
        if forget == "zero_grad":
            reducer.finish()
        with pytest.raises(RuntimeError, match="already summed over ranks"):
            model(inputs(0, 1)).sum().backward()
        reducer.finish()

    ranks.run(2, twice)


def test_construction_copies_parameters_and_buffers_of_the_first_rank() -> None:
    def differ(group: Group) -> dict[str, Tensor]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(group.rank + 1)
        DistributedDataParallel(model, group)
        return parameters_of(model) | dict(model.named_buffers())

    for got in ranks.run(3, differ):
        assert all((tensor == 1).all() for tensor in got.values())
        assert got["1.running_mean"].shape == (3,)


def test_buckets_are_in_reverse_order_and_hold_one_dtype() -> None:
    model = Linears([8, 8, 8, 8], torch.float32)
    model[1].to(torch.float64)
    buckets = plan(model.parameters(), 2 * 9 * 8 * 4)
    positions = {parameter: index for index, parameter in enumerate(model.parameters())}
    assert [[positions[p] for p in bucket] for bucket in buckets] == [[5, 4, 1, 0], [3], [2]]
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)


def test_a_parameter_larger_than_a_bucket_has_its_own() -> None:
    model = Linears([8, 100, 2])
    sizes = [[p.numel() for p in bucket] for bucket in plan(model.parameters(), 2000)]
    assert sizes == [[2, 200], [100], [800]]


def test_tied_and_frozen_parameters_are_planned_once_and_never() -> None:
    model = Linears([4, 4, 4])
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    planned = [p for bucket in plan([*model[0].parameters(), *model[1].parameters()]) for p in bucket]
    assert planned == [model[1].bias, model[0].weight]


def test_a_bucket_needs_room() -> None:
    with pytest.raises(ValueError, match="not 0"):
        plan([], 0)


def test_alone_it_changes_nothing() -> None:
    def run(_: Group) -> None:
        compare(
            parallel_gradients(ALONE, CHOICES["right nowhere"]), serial_gradients(ALONE, CHOICES["right nowhere"], 1)
        )

    ranks.alone(run)
