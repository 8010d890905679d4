"""Every data-parallel strategy behind one face, so that each test is written once."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from reference import comm, finalize, loss
from reference.comm import Group
from reference.data_parallel.buckets import views_of
from reference.data_parallel.ddp import DistributedDataParallel
from reference.data_parallel.parameter_server import ParameterServer
from reference.data_parallel.shards import Shard
from reference.data_parallel.zero1 import Zero1
from reference.data_parallel.zero2 import Zero2
from reference.data_parallel.zero3 import Zero3
from reference.model import GPT
from tests.reference import ranks
from tests.reference.equivalence import assert_equal_in_float64
from tests.reference.training import (
    OPTIMIZERS,
    Problem,
    Trajectory,
    gradients_of,
    norms_by_step,
    parameters_of,
    serial,
    share_of_loss,
)

BUCKET_BYTES = 16384
"""Small enough that the small model has many buckets."""


class Strategy:
    """What a training loop needs of a strategy. This one is DDP; the others change what differs."""

    def __init__(self, model: GPT, group: Group, optimizer: Callable[[Sequence[Parameter]], Optimizer]) -> None:
        self.model, self.group = model, group
        self.prepare(optimizer)

    def prepare(self, optimizer: Callable[[Sequence[Parameter]], Optimizer]) -> None:
        self.ddp = DistributedDataParallel(self.model, self.group, bucket_bytes=BUCKET_BYTES)
        self.optimizer = optimizer(list(self.model.parameters()))

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.ddp.no_sync()

    def after_backward(self, *, last: bool) -> None:
        if last:
            self.ddp.finish()

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(self.model)

    def step(self, max_norm: float | None) -> Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = finalize.sum_of_squares(gradients).sqrt()
        if max_norm is not None:
            finalize.clip(gradients, norm, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def parameters(self) -> dict[str, Tensor]:
        return parameters_of(self.model)

    def _unsharded(self, pieces: Sequence[tuple[Shard, Sequence[Parameter]]]) -> dict[str, Tensor]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found = {}
        for shard, parameters in pieces:
            assert shard.gradient is not None
            flat = comm.all_gather(shard.gradient, self.group)
            shapes = [torch.empty(self.shapes[names[p]], device="meta") for p in parameters]
            found.update({names[p]: view.clone() for p, view in zip(parameters, views_of(flat, shapes), strict=True)})
        return found

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.model.named_parameters()}


class Server(Strategy):
    def prepare(self, optimizer: Callable[[Sequence[Parameter]], Optimizer]) -> None:
        self.center = ParameterServer(self.model.parameters(), self.group, optimizer, server=self.group.size - 1)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def after_backward(self, *, last: bool) -> None: ...

    def gradients(self) -> dict[str, Tensor]:
        """The sums exist on the server, inside a step; so they are summed here by other means."""
        found = gradients_of(self.model)
        for gradient in found.values():
            comm.all_reduce(gradient, self.group).wait()
        return found

    def step(self, max_norm: float | None) -> Tensor:
        norm = self.center.step(max_norm)
        norm = torch.zeros((), dtype=torch.float64) if norm is None else norm
        comm.broadcast(norm, self.group.size - 1, self.group).wait()
        return norm


class Stage1(Strategy):
    kind: type[Zero1] = Zero1

    def prepare(self, optimizer: Callable[[Sequence[Parameter]], Optimizer]) -> None:
        self.zero = self.kind(self.model.parameters(), self.group, optimizer, bucket_bytes=BUCKET_BYTES)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.zero.no_sync()

    def after_backward(self, *, last: bool) -> None:
        if last:
            self.zero.finish()

    def gradients(self) -> dict[str, Tensor]:
        return self._unsharded([(self.zero.shard_of[bucket], bucket.parameters) for bucket in self.zero.buckets])

    def step(self, max_norm: float | None) -> Tensor:
        return self.zero.step(max_norm)


class Stage2Once(Stage1):
    kind = Zero2


class Stage2(Stage2Once):
    """Reduces each microbatch, and adds to the shard."""

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def after_backward(self, *, last: bool) -> None:
        self.zero.finish()


class Stage3(Strategy):
    def prepare(self, optimizer: Callable[[Sequence[Parameter]], Optimizer]) -> None:
        self.given_shapes = super().shapes
        self.zero = Zero3(self.model, list(self.model.blocks), self.group, optimizer)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return self.given_shapes

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def after_backward(self, *, last: bool) -> None:
        self.zero.finish()

    def gradients(self) -> dict[str, Tensor]:
        return self._unsharded([(unit.shard, unit.parameters) for unit in self.zero.units])

    def step(self, max_norm: float | None) -> Tensor:
        return self.zero.step(max_norm)

    def parameters(self) -> dict[str, Tensor]:
        with self.zero.full_parameters():
            return parameters_of(self.model)


STRATEGIES: dict[str, type[Strategy]] = {
    "ddp": Strategy,
    "parameter_server": Server,
    "zero1": Stage1,
    "zero2": Stage2,
    "zero2_reduced_once": Stage2Once,
    "zero3": Stage3,
}


def train(group: Group, problem: Problem, kind: type[Strategy] = Strategy) -> Trajectory:
    """Train as `training.serial` does, on several ranks."""
    model = problem.model()
    if group.rank:  # only the first rank's weights may count
        for parameter in model.parameters():
            parameter.data.zero_()
    strategy = kind(model, group, OPTIMIZERS[problem.optimizer])
    result = Trajectory()
    for step in range(problem.steps):
        batch = problem.share(step, group)
        count = loss.global_count([targets for _, targets in batch], group)
        shares = []
        for index, part in enumerate(batch):
            last = index == len(batch) - 1
            with strategy.microbatch(last=last):
                share = share_of_loss(model, part, count, problem.microbatches)
                share.backward()
            strategy.after_backward(last=last)
            shares.append(share.detach())
        result.losses.append(float(loss.reported(torch.stack(shares).sum(), group)))
        result.gradients.append(strategy.gradients())
        result.norms.append(strategy.step(problem.max_norm))
    result.parameters = strategy.parameters()
    return result


@cache
def expected(problem: Problem) -> Trajectory:
    """Return what serial training computes; once a problem."""
    result = ranks.alone(serial, problem)
    assert isinstance(result, Trajectory)
    return result


def assert_matches(got: Trajectory, want: Trajectory) -> None:
    """Compare losses, every gradient of every step, norms and last parameters, computed in float64."""
    for step, gradients in enumerate(want.gradients):
        assert_equal_in_float64(got.gradients[step], gradients, f"gradient of step {step}")
    assert_equal_in_float64(norms_by_step(got.norms), norms_by_step(want.norms), "norm before clipping")
    assert_equal_in_float64(got.parameters, want.parameters, "parameter")
    losses = [{str(i): torch.tensor(x, dtype=torch.float64) for i, x in enumerate(t.losses)} for t in (got, want)]
    assert_equal_in_float64(losses[0], losses[1], "loss")


class Linears(nn.Sequential):
    """A small stack of linear layers for tests that need no language model."""

    def __init__(self, widths: Sequence[int], dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(3)
        layers = [nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)]
        super().__init__(*layers)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
