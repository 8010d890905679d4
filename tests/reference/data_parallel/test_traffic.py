"""Bytes, calls, memory and overlap of each data-parallel strategy are those that its docstring announces."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import loss
from reference.comm import Group
from reference.data_parallel import zero3
from reference.data_parallel.buckets import plan
from reference.data_parallel.ddp import GradientReducer
from reference.data_parallel.units import Unit
from reference.model import GPT, GPTConfig
from tests.reference import ranks
from tests.reference.data_parallel.strategies import BUCKET_BYTES, STRATEGIES, Linears, Strategy
from tests.reference.traffic import Traffic, loopback_bytes
from tests.reference.training import Problem, sgd, share_of_loss

# Widths divide by 8 ranks, so that every bucket does and the formulas are exact.
EVEN = GPTConfig(vocab_size=64, max_positions=8, num_layers=3, num_heads=4, num_kv_heads=2, width=16)
ELEMENT = 8


@dataclass(frozen=True)
class Step:
    """What one step did on one rank."""

    sent: float
    calls: dict[str, int]


def one_step(group: Group, kind: type[Strategy], microbatches: int, config: GPTConfig = EVEN) -> Step:
    """Run two steps and count the second: the first records the order of execution."""
    problem = Problem(config=config, microbatches=microbatches, sequences=8)
    model = problem.model()
    strategy = kind(model, group, sgd)
    for step in range(2):
        batch = problem.share(step, group)
        count = loss.global_count([targets for _, targets in batch], group)
        with Traffic() as traffic:
            for index, part in enumerate(batch):
                last = index == len(batch) - 1
                with strategy.microbatch(last=last):
                    share_of_loss(model, part, count, microbatches).backward()
                strategy.after_backward(last=last)
            strategy.step(None)
    return Step(traffic.sent, {name: traffic.count(name) for name in ("allreduce_", "send")})


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters()) * ELEMENT


def norm_bytes(p: int) -> float:
    return 2 * (p - 1) / p * ELEMENT


def expected_bytes(strategy: str, p: int, m: int) -> float:
    """The docstrings' formulas, written once more."""
    model = GPT(EVEN)
    whole, block = parameter_bytes(model), parameter_bytes(model.blocks[-1])
    root = whole - EVEN.num_layers * block
    share = (p - 1) / p
    return {
        "ddp": 2 * share * whole,
        "zero1": 2 * share * whole + norm_bytes(p),
        "zero2": m * share * whole + share * whole + norm_bytes(p),
        "zero2_reduced_once": 2 * share * whole + norm_bytes(p),
        "zero3": m * (3 * share * whole - share * root - share * block) + norm_bytes(p),
    }[strategy]


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero2_reduced_once", "zero3"])
def test_bytes_sent_per_rank_are_the_formula(strategy: str, m: int, p: int) -> None:
    for step in ranks.run(p, one_step, STRATEGIES[strategy], m):
        assert step.sent == pytest.approx(expected_bytes(strategy, p, m), rel=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_worker_sends_its_gradient_and_the_server_all_weights(p: int) -> None:
    gradient = parameter_bytes(GPT(EVEN))

    def push_and_pull(group: Group) -> Step:
        model = Problem(config=EVEN).model()
        strategy = STRATEGIES["parameter_server"](model, group, sgd)
        with Traffic() as traffic:
            strategy.center.step()  # type: ignore[attr-defined]
        return Step(traffic.sent, {})

    *workers, server = ranks.run(p, push_and_pull)
    assert all(worker.sent == gradient for worker in workers)
    assert server.sent == (p - 1) * gradient


@pytest.mark.parametrize("m", [1, 3])
def test_one_call_a_bucket_however_many_microbatches(m: int) -> None:
    p = 4
    buckets = len(plan(GPT(EVEN).double().parameters(), BUCKET_BYTES))
    assert buckets > 5
    assert ranks.run(p, one_step, STRATEGIES["ddp"], m)[0].calls == {"allreduce_": buckets, "send": 0}
    zero1 = ranks.run(p, one_step, STRATEGIES["zero1"], m)[0].calls
    assert zero1 == {"allreduce_": 1, "send": 2 * buckets * (p - 1)}, "to each peer one message a bucket, twice"


WIDE = GPTConfig(vocab_size=64, max_positions=8, num_layers=3, num_heads=4, num_kv_heads=2, width=128)


def live_bytes(units: list[Unit]) -> int:
    return sum(unit.flat.untyped_storage().nbytes() for unit in units)


def peaks(group: Group) -> tuple[int, int, int, int]:
    """Return the peak of live parameters over all forward and backward hooks, and the parts it is made of."""
    problem = Problem(config=GPTConfig(64, 8, num_layers=6, num_heads=4, width=16), sequences=8)
    model = problem.model()
    block = parameter_bytes(model.blocks[0])
    root = parameter_bytes(model) - 6 * block
    strategy = STRATEGIES["zero3"](model, group, sgd)
    units = strategy.zero.units  # type: ignore[attr-defined]
    seen = []

    def look(*_: Any) -> None:
        seen.append(live_bytes(units))

    for module in model.modules():
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    for step in range(2):
        batch = problem.share(step, group)
        share_of_loss(model, batch[0], torch.tensor(1), 1).backward()
        strategy.after_backward(last=True)
        strategy.step(None)
    return max(seen), live_bytes(units), root, block


def test_zero3_holds_the_root_and_two_units_at_most() -> None:
    for peak, after, root, block in ranks.run(4, peaks):
        assert peak == root + 2 * block, "the unit that computes and the one on its way"
        assert after == 0, "nothing stays between steps"


def events(group: Group, kind: type[GradientReducer]) -> list[str]:
    """Return the order in which gradients came and all-reduces started in one backward pass."""
    model = Linears([16, 16, 16, 16, 16, 16])
    reducer = kind(model.parameters(), group, bucket_bytes=16 * 17 * ELEMENT)
    order: list[str] = []
    launch = reducer._launch

    def logged(bucket: Any) -> None:
        order.append("launch")
        launch(bucket)

    reducer._launch = logged  # type: ignore[method-assign]
    for index, layer in enumerate(model):
        layer.weight.register_hook(lambda _, index=index: order.append(f"gradient {index}"))
    model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
    order.append("backward ended")
    reducer.finish()
    return order


def overlap(order: list[str]) -> float:
    """Return the share of buckets whose all-reduce starts before the last gradient is computed."""
    last = max(index for index, event in enumerate(order) if event.startswith("gradient"))
    return order[:last].count("launch") / order.count("launch")


def test_all_buckets_but_the_last_start_while_backward_runs() -> None:
    for order in ranks.run(2, events, GradientReducer):
        assert order.count("launch") == 5
        assert overlap(order) == 4 / 5


def test_buckets_in_forward_order_would_hide_nothing() -> None:
    class ForwardOrder(GradientReducer):
        def __init__(self, parameters: Any, group: Group, **options: Any) -> None:
            super().__init__(parameters, group, **options)
            self.buckets.reverse()

    assert overlap(ranks.run(2, events, ForwardOrder)[0]) == 0


def gather_order(group: Group) -> tuple[list[str], int]:
    """Run units in another order than they were given in; return the gathers of the second step, and the peak."""
    layers = Linears([8, 8, 8, 8, 8])
    names = dict(zip(layers, "abcd", strict=True))

    class Backwards(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers
            self.scale = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x * self.scale

    module = Backwards()
    zero = zero3.Zero3(module, list(layers), group, sgd)
    gathered: list[str] = []
    peak = 0
    prefetch = Unit.prefetch

    def logged(unit: Unit) -> None:
        nonlocal peak
        if not unit.is_live:
            gathered.append("root" if unit is zero.root else names[list(layers)[zero.units.index(unit) - 1]])
        prefetch(unit)
        peak = max(peak, sum(unit.is_live for unit in zero.units))

    Unit.prefetch = logged  # type: ignore[method-assign]
    for _ in range(2):
        gathered.clear()
        peak = 0
        module(torch.ones(3, 8, dtype=torch.float64)).sum().backward()
        zero.finish()
        zero.step()
    return gathered, peak


def test_zero3_gathers_in_the_order_of_execution_not_of_registration() -> None:
    for gathered, peak in ranks.run(2, gather_order):
        assert gathered == ["root", "d", "c", "b", "a", "b", "c", "d"], "forward, then backward; the last is kept"
        assert peak == 3, "the root, the unit that computes and the one on its way"


def large_step(group: Group, strategy: str) -> None:
    """One step of a model whose messages are large beside their headers."""
    problem = Problem(config=WIDE, sequences=8, steps=1)
    model = problem.model()
    parallel = STRATEGIES[strategy](model, group, sgd)
    for part in problem.share(0, group):
        share_of_loss(model, part, torch.tensor(1), 1).backward()
    parallel.after_backward(last=True)
    parallel.step(None)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "parameter_server"])
def test_kernel_counts_the_bytes_of_a_step(strategy: str) -> None:
    """Twice as many steps must send the payload's formula more: what a construction broadcasts falls out."""
    p = 4
    model = GPT(WIDE)
    whole, block = parameter_bytes(model), parameter_bytes(model.blocks[-1])
    root = whole - WIDE.num_layers * block
    share = (p - 1) / p
    formula = {
        "ddp": 2 * share * whole * p,
        "zero1": 2 * share * whole * p,
        "zero2": 2 * share * whole * p,
        "zero3": (3 * whole - root - block) * share * p,
        "parameter_server": 2 * (p - 1) * whole,
    }[strategy]
    construction = (p - 1) * whole
    measured = loopback_bytes(p, large_step, strategy)
    assert formula + construction <= measured <= 1.05 * (formula + construction)
