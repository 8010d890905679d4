"""After backward: what is still a partial sum is reduced, in one ordered list; then the one true global norm.

Every parameter says how it lies on the mesh (`Layout`), axis by axis:

    partial      ranks along the axis hold partial sums of the same gradient: they are summed
    sharded      ranks along the axis hold other elements: their squares add up in the norm
    neither      ranks along the axis hold the same gradient already: it counts once

The order is the same on every rank, whatever order backward ran in:

    1. `tp`                  parameters of sequence-parallel regions (norms, biases of row-parallel layers)
    2. first and last stage  tied embeddings of a pipeline
    3. `cp`, `ep`, `dp`      what no reducer (DDP, ZeRO) has summed during backward: dense over all three axes,
                             experts over `cp` and `dp`

Bytes sent per rank: 2(p-1)/p of the gradients in each group of the list, one call a dtype; 2(w-1)/w x 8 for the norm.
Memory: one flat copy of the gradients that travel together.
Paper: Korthikanti et al. 2022 (1); Shoeybi et al. 2019 and Narayanan et al. 2021, section 3.4 (2, the norm).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import comm
from .comm import Group, Groups
from .mesh import DENSE, LAYOUT


@dataclass(frozen=True)
class Layout:
    """How a parameter and its gradient lie on the mesh.

    Attributes:
        partial: Axes along which gradients are partial sums.
        sharded: Axes along which other elements lie; `pp` for all that is not tied, since stages hold other layers.
        tied: Held by the first and the last stage, which both contribute to its gradient.
    """

    partial: tuple[str, ...] = DENSE
    sharded: tuple[str, ...] = ("pp",)
    tied: bool = False


def lay(parameter: Tensor, layout: Layout) -> None:
    """Note how `parameter` lies on the mesh."""
    parameter.layout = layout  # type: ignore[attr-defined]  # tensors take attributes, and keep them with the weight


def layout_of(parameter: Tensor) -> Layout:
    """Return the layout noted by `lay`; that of a dense replicated parameter where none was."""
    layout: Layout = getattr(parameter, "layout", Layout())
    return layout


@dataclass(frozen=True)
class Residual:
    """Gradients that travel together."""

    name: str
    group: Group
    parameters: tuple[Tensor, ...]


def residuals(parameters: Iterable[Tensor], groups: Groups, reduced: Collection[str] = ()) -> tuple[Residual, ...]:
    """List what is still to be summed, in the order of this file's table.

    Args:
        parameters: Of this rank, in one order on all ranks that hold them; repetitions count once.
        groups: The mesh's groups.
        reduced: Axes that DDP or ZeRO has summed already.
    """
    unique = tuple(dict.fromkeys(parameters))
    found = [
        Residual("sequence", groups.along("tp"), tuple(p for p in unique if "tp" in layout_of(p).partial)),
        Residual("tied", groups.first_and_last_stage(), tuple(p for p in unique if layout_of(p).tied)),
    ]
    wanted = [tuple(axis for axis in LAYOUT if axis in layout_of(p).partial and axis != "tp") for p in unique]
    for axes in sorted(set(wanted)):
        members = tuple(p for p, its in zip(unique, wanted, strict=True) if its == axes)
        left = tuple(axis for axis in axes if axis not in reduced)
        if left:
            found.append(Residual("data " + "+".join(left), groups.along(*left), members))
    return tuple(residual for residual in found if residual.parameters and residual.group.size > 1)


@torch.no_grad()
def reduce_residuals(listed: Sequence[Residual]) -> None:
    """Sum the listed gradients, one after the other. A parameter without gradient contributes zeros."""
    for residual in listed:
        for parameter in residual.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in residual.parameters if parameter.grad is not None]
        for kind in dict.fromkeys((gradient.dtype, gradient.device) for gradient in gradients):
            members = [gradient for gradient in gradients if (gradient.dtype, gradient.device) == kind]
            _sum_together(members, residual.group)


def _sum_together(gradients: list[Tensor], group: Group) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    comm.all_reduce(flat, group).wait()
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device | str = "cpu") -> Tensor:
    """Return the sum of squares of all elements: float64, scalar; each tensor is reduced in float32 at least."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    total = torch.zeros((), dtype=torch.float64, device=filled[0].device if filled else device)
    for dtype in dict.fromkeys(gradient.dtype for gradient in filled):
        members = [gradient for gradient in filled if gradient.dtype == dtype]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(members, 2, dtype=wide))
        total += norms.double().square().sum()
    return total


@torch.no_grad()
def global_norm(gradients: Iterable[tuple[Tensor, Layout]], groups: Groups) -> Tensor:
    """Return the norm over every element of the model, once each: what serial training would compute.

    Args:
        gradients: This rank's final gradients (nothing partial left), with their layouts. Where ZeRO shards them, its
            axes belong to `sharded`.
        groups: The mesh's groups.

    Returns:
        float64, scalar, bitwise equal on every rank.
    """
    mine = [gradient for gradient, layout in gradients if _counts_here(layout, groups)]
    total = sum_of_squares(mine)
    comm.all_reduce(total, groups.along(*LAYOUT)).wait()
    return total.sqrt()


def _counts_here(layout: Layout, groups: Groups) -> bool:
    """Of ranks with the same gradient, the one at coordinate 0 counts it."""
    return all(groups.coordinates[axis] == 0 for axis in LAYOUT if axis not in layout.sharded)


@torch.no_grad()
def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`, as `clip_grad_norm_` does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(list(gradients), factor)
