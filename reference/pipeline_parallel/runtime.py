"""Runs any valid schedule: one rank's actions, with messages that can neither deadlock nor get mixed up.

A send never waits: on every transport a receiver may come late (gloo's sends are rendezvous), so a rank that waited
for its send while its peer waited for its own would wait for ever. And messages between two ranks arrive in the order
in which they were sent, not in the order in which they are wanted; both orders follow from the schedule, so receives
are posted in the sender's order, each into a buffer of its own.

Bytes sent per rank: 2 b s h e a boundary between ranks a microbatch. Memory: what the schedule keeps alive, and on CPUs
two buffers a peer for what may come early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import comm
from ..comm import Group, Pending
from .actions import Action, Kind, Schedule
from .split_linear import Deferred, deferring

Loss = Callable[[Tensor, int], Tensor]
"""(output of the last stage, microbatch) -> scalar; shares of one step are summed, so divide by the step's count."""


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor that crosses between two ranks: the output of an action, for the stage that needs it."""

    source: int
    destination: int
    stage: int  # of the receiver
    microbatch: int
    is_gradient: bool


def messages(schedule: Schedule) -> tuple[Message, ...]:
    """Return all messages between ranks, those of each sender in the order in which it sends them."""
    found = []
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage = _receiver(action, schedule.num_stages)
            if stage is not None and schedule.rank_of(stage) != rank:
                is_gradient = action.kind is not Kind.FORWARD
                found.append(Message(rank, schedule.rank_of(stage), stage, action.microbatch, is_gradient))
    return tuple(found)


def _receiver(action: Action, num_stages: int) -> int | None:
    if action.kind is Kind.FORWARD:
        return action.stage + 1 if action.stage < num_stages - 1 else None
    return action.stage - 1 if action.kind is not Kind.BACKWARD_WEIGHT and action.stage else None


@dataclass(slots=True)
class _Kept:
    """What a forward leaves for its backward."""

    input: Tensor
    output: Tensor
    deferred: Deferred | None = None


class Pipeline:
    """One rank's part of a pipeline.

    Args:
        schedule: What to do.
        stages: This rank's virtual stages by number, each a module from `[batch, sequence, hidden]` to the same; stage
            0 takes what `step` is given, the last one's output goes to the loss.
        group: The pipeline's ranks, in the order of the schedule.
        shape: Of the tensors between stages, for example `(batch, sequence, hidden)`.
        dtype: Of the same.
        upward: A second group of the same ranks for messages to lower ranks. NCCL runs the messages of one pair of
            ranks one after the other, so with one group two large messages could wait for each other; gloo needs none.

    Raises:
        ValueError: The schedule is for another number of ranks, or the stages are not those of this rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        group: Group,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        upward: Group | None = None,
    ) -> None:
        if group.size != schedule.num_ranks:
            raise ValueError(f"the schedule is for {schedule.num_ranks} ranks, the group has {group.size}")
        expected = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == group.rank]
        if sorted(stages) != expected:
            raise ValueError(f"rank {group.rank} was given stages {sorted(stages)}, the schedule puts {expected} there")
        self.schedule, self.stages, self.group = schedule, dict(stages), group
        self._shape, self._dtype = tuple(shape), dtype
        self._device = next((p.device for stage in stages.values() for p in stage.parameters()), torch.device("cpu"))
        self._groups = (group, upward or group)
        # NCCL would run a receive that is posted early before the sends that its peer is waiting for.
        self.ahead = 2 if self._device.type == "cpu" else 0
        everything = messages(schedule)
        self._incoming = {
            peer: [m for m in everything if m.source == peer and m.destination == group.rank]
            for peer in range(group.size)
        }

    def step(self, inputs: Sequence[Tensor] | None, loss: Loss | None) -> Tensor:
        """Run forward and backward of every microbatch; gradients are added to the parameters' `.grad`.

        Args:
            inputs: One tensor a microbatch, on the rank of stage 0; ignored elsewhere.
            loss: On the rank of the last stage; ignored elsewhere.

        Returns:
            The sum of the losses, detached; zero on ranks without the last stage.
        """
        step = _Step(self, inputs, loss)
        for action in self.schedule.ranks[self.group.rank]:
            step.take(action)
        return step.finish()

    def direction(self, source: int, destination: int) -> Group:
        """Return the group that carries messages from `source` to `destination`."""
        return self._groups[source > destination]


class _Step:
    """The state of one step: what has arrived, what is kept, what is under way."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Tensor] | None, loss: Loss | None) -> None:
        self._pipeline, self._inputs, self._loss = pipeline, inputs, loss
        self._arrived: dict[tuple[int, int, bool], tuple[Tensor, Pending]] = {}
        self._posted = {peer: 0 for peer in pipeline._incoming}
        self._taken = dict(self._posted)
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._sends: list[tuple[Tensor, Pending]] = []
        self._total = torch.zeros((), device=pipeline._device)
        for peer in pipeline._incoming:
            self._post_ahead(peer)

    def take(self, action: Action) -> None:
        """Do one action."""
        if action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            for gradient in self._kept.pop((action.stage, action.microbatch)).deferred or ():
                gradient()
        else:
            self._backward(action)

    def finish(self) -> Tensor:
        """Wait for the last sends and return the sum of the losses."""
        for _, pending in self._sends:
            pending.wait()
        return self._total

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if stage == 0:
            assert self._inputs is not None, "the rank of stage 0 was given no inputs"
            value = self._inputs[microbatch]
        else:
            value = self._receive(stage, microbatch, is_gradient=False).requires_grad_()
        output = self._pipeline.stages[stage](value)
        if stage == self._pipeline.schedule.num_stages - 1:
            assert self._loss is not None, "the rank of the last stage was given no loss"
            output = self._loss(output, microbatch)
            self._total = self._total + output.detach()
        else:
            self._send(output.detach(), stage + 1, microbatch, is_gradient=False)
        self._kept[stage, microbatch] = _Kept(value, output)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        kept = self._kept[stage, microbatch]
        is_last = stage == self._pipeline.schedule.num_stages - 1
        gradient = None if is_last else self._receive(stage, microbatch, is_gradient=True)
        if action.kind is Kind.BACKWARD_INPUT:
            with deferring(self._pipeline.stages[stage]) as kept.deferred:
                torch.autograd.backward(kept.output, gradient)
        else:
            torch.autograd.backward(kept.output, gradient)
            del self._kept[stage, microbatch]
        if stage:
            assert kept.input.grad is not None
            self._send(kept.input.grad, stage - 1, microbatch, is_gradient=True)

    def _send(self, tensor: Tensor, stage: int, microbatch: int, *, is_gradient: bool) -> None:
        here, there = self._pipeline.group.rank, self._pipeline.schedule.rank_of(stage)
        if there == here:
            # Detached, since the next stage makes it a leaf of its own graph.
            self._arrived[stage, microbatch, is_gradient] = (tensor.detach(), Pending())
            return
        message = tensor.contiguous()
        group = self._pipeline.direction(here, there)
        # The tensor is kept until the send is done: its memory must not be reused while it travels.
        self._sends.append((message, comm.exchange([(message, there)], [], group)))

    def _receive(self, stage: int, microbatch: int, *, is_gradient: bool) -> Tensor:
        key = (stage, microbatch, is_gradient)
        sender = self._pipeline.schedule.rank_of(stage + (1 if is_gradient else -1))
        while key not in self._arrived:
            posted = self._post_next(sender)
            assert posted, "a valid schedule wants no message that is never sent"
        tensor, pending = self._arrived.pop(key)
        if sender != self._pipeline.group.rank:
            self._taken[sender] += 1
            self._post_ahead(sender)
        pending.wait()
        return tensor

    def _post_ahead(self, peer: int) -> None:
        """Keep some receives posted before they are wanted, so that messages travel while this rank computes."""
        while self._posted[peer] - self._taken[peer] < self._pipeline.ahead and self._post_next(peer):
            pass

    def _post_next(self, peer: int) -> bool:
        """Post the receive of the next message of `peer`, in the order in which it sends; False after its last."""
        pipeline = self._pipeline
        if self._posted[peer] == len(pipeline._incoming[peer]):
            return False
        message = pipeline._incoming[peer][self._posted[peer]]
        buffer = torch.empty(pipeline._shape, dtype=pipeline._dtype, device=pipeline._device)
        pending = comm.exchange([], [(buffer, peer)], pipeline.direction(peer, pipeline.group.rank))
        self._arrived[message.stage, message.microbatch, message.is_gradient] = (buffer, pending)
        self._posted[peer] += 1
        return True
