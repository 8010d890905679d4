"""The unit of ZeRO stage 3: parameters that come and go together.

A tensor's storage can be given memory and lose it again (`resize_`) while views of it live on: in parameters, and in
what autograd has kept for backward. That is all the machinery that gathering and freeing needs.
"""

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import comm
from ..comm import Group, Pending
from .buckets import broadcast_from_first, flatten, views_of
from .shards import Shard


class Unit:
    """Parameters that are gathered, freed and reduced together.

    They are views of `flat`, whose storage has memory only while the unit is live. Autograd may keep such views: it
    finds the same storage filled again when backward comes.
    """

    def __init__(self, parameters: list[Parameter], group: Group) -> None:
        self.parameters, self.group = parameters, group
        self.flat = flatten(parameters, group)
        broadcast_from_first([self.flat], group)
        self.shard = Shard(self.flat.view(group.size, -1)[group.rank].clone())
        self.missing = set(parameters)
        self.gradients: Tensor | None = None
        self.views: list[Tensor] = []
        self._gathering: Pending | None = None
        self._bytes = self.flat.nbytes
        self._count = sum(parameter.numel() for parameter in parameters)
        self.free()

    @property
    def is_live(self) -> bool:
        """Whether the parameters are there or on their way."""
        return self.flat.untyped_storage().nbytes() > 0

    @torch.no_grad()
    def prefetch(self) -> None:
        """Start to gather the parameters, unless they are there."""
        if not self.is_live:
            self.flat.untyped_storage().resize_(self._bytes)
            self._gathering = comm.all_gather_into(self.flat, self.shard.own, self.group)

    def gather(self) -> None:
        """Return when the parameters are there."""
        self.prefetch()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def free(self) -> None:
        """Give the parameters' memory back; the shard remains."""
        if self._gathering is not None:  # started for a pass that never came: nothing may arrive in freed memory
            self.gather()
        self.flat.untyped_storage().resize_(0)

    def place(self, index: int, parameter: Parameter) -> None:
        """Move the gradient of the parameter at `index` into the flat gradient, which is made with the first."""
        if self.gradients is None:
            self.gradients = self.shard.own.new_empty(self.flat.numel())
            self.views = views_of(self.gradients, self.parameters)
            self.gradients[self._count :].zero_()
        if parameter.grad is None:
            self.views[index].zero_()
        else:
            self.views[index].copy_(parameter.grad)
        parameter.grad = None
        self.missing.discard(parameter)

    def take_gradients(self) -> Tensor:
        """Return the flat gradient and forget it, ready for the next backward pass."""
        gradients = self.gradients
        assert gradients is not None, "a unit has at least one parameter"
        self.gradients, self.views = None, []
        self.missing.update(self.parameters)
        return gradients
