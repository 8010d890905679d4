"""Runs in every rank: calls the student's package `parallel`, and hands back what it computed.

The judge calls these functions by name. What a rank is given is its own: its part of the batch, and on rank 0 alone the
parameters that all ranks are to start from.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

PARAMETER, GRADIENT = "parameter.", "gradient."


class RankContext(Protocol):
    """What the agent tells a rank."""

    rank: int
    world_size: int
    group: Any
    values: dict[str, Any]

    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far."""
        ...


class Adapted(nn.Module):
    """A GPT with an adapter behind it that only some batches use, and a layer that none does.

    Args:
        gpt: Returns logits `[B, S, V]` and an auxiliary loss.
        vocabulary: V.
    """

    def __init__(self, gpt: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.gpt = gpt
        self.adapter = nn.Linear(vocabulary, vocabulary)
        self.idle = nn.Linear(3, 2)

    def forward(self, tokens: Tensor, adapted: bool) -> Tensor:
        """`[B, S]` int64 -> logits `[B, S, V]`."""
        logits: Tensor = self.gpt(tokens)[0]
        return logits + self.adapter(logits) if adapted else logits


def train_step(context: RankContext, inputs: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Do one step of data-parallel training, without the optimizer.

    Args:
        context: The rank.
        inputs: `tokens` and `targets`, `[microbatches, B, S]` int64; `adapted`, `[microbatches]`, whether a microbatch
            uses the adapter; `parameter.<name>`: what this rank's parameters are before the model is wrapped.
        arguments: `config`, the sizes of the model; `bucket_bytes`; `find_unused`.

    Returns:
        `parameter.<name>` and `gradient.<name>`; no gradient where a parameter has none.
    """
    from parallel import loss  # noqa: PLC0415  (student code is imported in the ranks alone)
    from parallel.comm import Group  # noqa: PLC0415
    from parallel.data_parallel.ddp import DistributedDataParallel  # noqa: PLC0415
    from parallel.model import GPT, GPTConfig  # noqa: PLC0415

    config = GPTConfig(**arguments["config"])
    model = Adapted(GPT(config), config.vocab_size).to(torch.float64)
    load(model, inputs)
    group = Group.of(context.group)
    options = {"find_unused": True} if arguments["find_unused"] else {}
    replica = DistributedDataParallel(model, group, bucket_bytes=arguments["bucket_bytes"], **options)
    before = context.bytes_sent()
    tokens, targets, adapted = (inputs[name] for name in ("tokens", "targets", "adapted"))
    count = loss.global_count(targets, group)
    last = len(tokens) - 1
    for microbatch in range(len(tokens)):
        with nullcontext() if microbatch == last else replica.no_sync():
            logits = replica(tokens[microbatch], bool(adapted[microbatch]))
            loss.scaled(loss.cross_entropy_sum(logits, targets[microbatch]), count).backward()
    replica.finish()
    context.values["bytes_sent"] = context.bytes_sent() - before
    return state(model)


@torch.no_grad()
def load(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Overwrite a model's parameters with `parameter.<name>`."""
    for name, parameter in model.named_parameters():
        parameter.copy_(inputs[PARAMETER + name])


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and those of its gradients that are there."""
    parameters = dict(model.named_parameters())
    found = {PARAMETER + name: parameter.detach() for name, parameter in parameters.items()}
    return found | {GRADIENT + name: p.grad for name, p in parameters.items() if p.grad is not None}
