"""The parameter server: workers send gradients to a centre, which updates the weights and sends them back.

Algorithm. One rank is the server (and a worker too, since it has a share of the tokens). Every step the others send it
their gradients; it sums them, takes the optimizer's step, and sends each the new weights. The optimizer's state lives
on the server alone.

Bytes sent per rank: a worker G; the server (p-1) P. All of it passes the server's link, so a step takes p-1 times as
    long on the wire as with all-reduce: the centre is the bottleneck.
Memory: a worker has weights and gradients; the server has the optimizer's state too, and room for p-1 gradients.
Bubble: workers idle while the server updates and sends.
Paper: Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014).
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import comm
from ..comm import ALONE, Group
from ..finalize import clip, sum_of_squares
from .buckets import broadcast_from_first, flatten, views_of


class ParameterServer:
    """Weights that a central rank updates.

    Args:
        parameters: Of one dtype, in one order on all ranks. They become views of one flat tensor.
        group: The workers, the server among them.
        optimizer: Makes the optimizer from parameters; called on the server only.
        server: The server's index in the group.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        group: Group,
        optimizer: Callable[[list[Parameter]], Optimizer],
        server: int = 0,
    ) -> None:
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self.group, self.server = group, server
        self.weights = flatten(self.parameters, ALONE)
        broadcast_from_first([self.weights], group)
        self.gradients = torch.zeros_like(self.weights)
        self.views = views_of(self.gradients, self.parameters)
        self.optimizer = optimizer(self.parameters) if group.rank == server else None

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> Tensor | None:
        """Push gradients, update on the server, pull weights; the gradients are None afterwards.

        Returns:
            On the server the gradients' global norm before clipping (float64, scalar); None elsewhere.
        """
        self._pack()
        norm = None
        if self.optimizer is None:
            comm.send(self.gradients, self.server, self.group)
            comm.receive(self.weights, self.server, self.group)
        else:
            self._sum_from_workers()
            norm = self._update(self.optimizer, max_norm)
            comm.exchange([(self.weights, worker) for worker in self._workers()], [], self.group).wait()
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def _pack(self) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def _workers(self) -> list[int]:
        return [index for index in range(self.group.size) if index != self.server]

    def _sum_from_workers(self) -> None:
        """All workers send at once; sums are taken in the order of ranks, so that repeated runs agree."""
        arrivals = [(torch.empty_like(self.gradients), worker) for worker in self._workers()]
        pending = [comm.exchange([], [arrival], self.group) for arrival in arrivals]
        for receipt, (gradient, _) in zip(pending, arrivals, strict=True):
            receipt.wait()
            self.gradients.add_(gradient)

    def _update(self, optimizer: Optimizer, max_norm: float | None) -> Tensor:
        norm = sum_of_squares([self.gradients]).sqrt()
        if max_norm is not None:
            clip([self.gradients], norm, max_norm)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        optimizer.step()
        return norm
