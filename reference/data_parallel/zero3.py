"""ZeRO stage 3 (fully sharded data parallel): parameters, gradients and optimizer states all in shards.

Algorithm. The model is cut into units (its blocks, and a root with the rest). Of each unit a rank owns 1/p, flat. A
unit is gathered just before its forward pass and freed after it, gathered again just before its backward pass, and
freed once its gradients are there; these are reduce-scattered while backward goes on. While a unit computes, the next
one in the *recorded order of execution* is already on its way, so communication hides behind compute.

Two units need not be gathered twice: the root, which is used first and last (tied embeddings), and the last unit,
whose backward pass follows its forward pass at once.

Bytes sent per rank and microbatch: 3(p-1)/p P, less (p-1)/p of the root's and of the last unit's bytes.
Memory: 16N/p bytes in mixed precision with Adam, the root, and two more units: the one that computes and the one on
    its way; two gradients in flight.
Bubble: exposed communication of the first gather, and where a unit's gather takes longer than its neighbour's compute.
Paper: Rajbhandari et al., ZeRO (SC 2020), section 5.3; Zhao et al., PyTorch FSDP (VLDB 2023).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter

from .. import comm
from ..comm import Group, Pending
from .shards import MakeOptimizer, Shard, ShardedOptimizer
from .units import Unit

IN_FLIGHT = 2


class Zero3:
    """A module whose units live only while they compute. Each step: `finish()` after every backward, then `step()`.

    Args:
        module: Called as ever; hooks do the rest. Use it nowhere while `Zero3` is being made.
        units: Submodules, such as the blocks; the rest of the module is the root, and where no parameter is left for
            it, the first unit is. The first forward pass records their order; until then the given order is taken.
        group: The ranks that share the parameters; they hold other tokens.
        optimizer: Makes the optimizer from this rank's shards. It must work element by element.
        find_unused: Allow parameters without gradient; in a shard theirs is zero, so weight decay applies to them.

    Raises:
        ValueError: Two units share a parameter, which can be freed with only one of them.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        group: Group,
        optimizer: MakeOptimizer,
        *,
        find_unused: bool = False,
    ) -> None:
        self.module, self.group, self.find_unused = module, group, find_unused
        inside = [parameter for unit in units for parameter in unit.parameters()]
        if len(set(inside)) < len(inside):
            raise ValueError("two units share a parameter; leave shared parameters to the root, outside all units")
        rest = [parameter for parameter in module.parameters() if parameter not in set(inside)]
        if not rest:
            rest, units = list(units[0].parameters()), units[1:]
        self.root = Unit(rest, group)
        self.units = [self.root, *(Unit(list(unit.parameters()), group) for unit in units)]
        self._order = list(self.units)
        self._recording: list[Unit] = []
        self._in_flight: list[tuple[Shard, Tensor, Pending]] = []
        self._reduced: set[Unit] = set()
        for unit, owner in zip(self.units, (module, *units), strict=True):
            owner.register_forward_pre_hook(partial(self._before_forward, unit))
            owner.register_forward_hook(partial(self._after_forward, unit))
            for index, parameter in enumerate(unit.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, unit, index))
        self.optimizer = ShardedOptimizer([unit.shard for unit in self.units], group, optimizer)

    def _before_forward(self, unit: Unit, *_: Any) -> None:
        if unit is self.root:  # a new pass: the last one says what comes after what
            self._order, self._recording = self._recording or self._order, []
        self._recording.append(unit)
        unit.gather()
        position = len(self._recording)
        if position < len(self._order) and self._order[position - 1] is unit:
            self._order[position].prefetch()

    def _after_forward(self, unit: Unit, _module: nn.Module, _arguments: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        followed = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.requires_grad]
        if followed:
            register_multi_grad_hook(followed, partial(self._before_backward, unit), mode="any")
        kept = unit is self.root or unit is self._order[-1]  # their backward pass comes first, or needs them all along
        if not followed or not kept:
            unit.free()

    def _before_backward(self, unit: Unit, *_: Any) -> None:
        unit.gather()
        position = self._recording.index(unit)
        if position > 0 and self._recording[position - 1] not in self._reduced:
            self._recording[position - 1].prefetch()

    def _arrived(self, unit: Unit, index: int, parameter: Parameter) -> None:
        if unit in self._reduced:
            raise RuntimeError("call finish() after every backward pass")
        unit.place(index, parameter)
        if not unit.missing:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Start to sum a unit's gradients into a new shard; keep few others on their way."""
        unit.free()
        self._reduced.add(unit)
        if len(self._in_flight) == IN_FLIGHT:
            self._settle(*self._in_flight.pop(0))
        total = torch.empty_like(unit.shard.own)
        pending = comm.reduce_scatter_into(total, unit.take_gradients(), self.group)
        self._in_flight.append((unit.shard, total, pending))

    @staticmethod
    def _settle(shard: Shard, total: Tensor, pending: Pending) -> None:
        pending.wait()
        shard.add_gradient(total)

    def finish(self) -> None:
        """Reduce what backward left out, and wait for everything. Call it after every backward pass.

        Raises:
            RuntimeError: A parameter had no gradient and `find_unused` is off.
        """
        for unit in reversed(self.units):
            if unit not in self._reduced:
                self._fill_gaps(unit)
                self._reduce(unit)
        while self._in_flight:
            self._settle(*self._in_flight.pop(0))
        self._reduced.clear()

    def _fill_gaps(self, unit: Unit) -> None:
        if not self.find_unused:
            raise RuntimeError(f"{len(unit.missing)} parameters had no gradient; pass find_unused=True")
        for index, parameter in enumerate(unit.parameters):
            if parameter in unit.missing:
                unit.place(index, parameter)

    def step(self, max_norm: float | None = None) -> Tensor:
        """Clip by the global norm and update this rank's shards; the next forward pass gathers them.

        Returns:
            The global norm before clipping: float64, scalar.
        """
        return self.optimizer.step(max_norm)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """All parameters are there inside, to read or save."""
        for unit in self.units:
            unit.gather()
        yield
        for unit in self.units:
            unit.free()
