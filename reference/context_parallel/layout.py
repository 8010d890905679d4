"""Which tokens of the sequence lie on which rank.

    contiguous   rank r holds the r-th of p parts. With a causal mask the last rank works, the first one waits.
    zigzag       the sequence is cut in 2p parts and rank r holds parts r and 2p-1-r: one early, one late, so that
                 causal work is equal on every rank.

Anything that depends on a token's place (rotary or learned positions, targets) must be split the same way: that is
what `positions` is for. Sends nothing.
Paper: the zigzag (striped) order: Brandon et al. 2023, "Striped Attention"; in this form, the Llama 3 report,
Grattafiori et al. 2024, section 3.3.2.
"""

from enum import StrEnum

import torch
from torch import Tensor


class Layout(StrEnum):
    """How a sequence is split over context parallel ranks."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


def positions(length: int, rank: int, size: int, layout: Layout) -> Tensor:
    """Return the places in the whole sequence of the tokens that `rank` holds, in its order: int64 `[length / size]`.

    Raises:
        ValueError: The length does not divide by the parts that the layout needs.
    """
    parts = size if layout is Layout.CONTIGUOUS else 2 * size
    if length % parts:
        raise ValueError(
            f"a sequence of {length} tokens does not divide into the {parts} parts of a {layout} layout on {size} ranks"
        )
    pieces = torch.arange(length).chunk(parts)
    if layout is Layout.CONTIGUOUS:
        return pieces[rank]
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def split(tensor: Tensor, rank: int, size: int, layout: Layout, dim: int = 1) -> Tensor:
    """Return the part of a whole sequence tensor that `rank` holds."""
    return tensor.index_select(dim, positions(tensor.shape[dim], rank, size, layout).to(tensor.device))


def join(parts: list[Tensor], layout: Layout, dim: int = 1) -> Tensor:
    """Return the whole sequence from every rank's part."""
    size = len(parts)
    length = sum(part.shape[dim] for part in parts)
    order = torch.cat([positions(length, rank, size, layout) for rank in range(size)]).to(parts[0].device)
    return torch.cat(parts, dim).index_select(dim, order.argsort())
