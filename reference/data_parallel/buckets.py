"""Flat storage: many parameters side by side in one tensor, so that one message carries them all.

A message costs alpha + beta n: a bucket pays alpha once for many parameters. Views into the flat tensor keep each
parameter's shape, so nothing is packed or unpacked.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import comm
from ..comm import Group

BUCKET_BYTES = 25 << 20
"""Torch's own default, 25 MiB: large enough for bandwidth, small enough to start early."""


def kind_of(parameter: Tensor) -> Hashable:
    """What must be equal for parameters to share a bucket: dtype, device, and layout on the mesh if it has one."""
    return parameter.dtype, parameter.device, getattr(parameter, "mesh_layout", None)


def plan(
    parameters: Iterable[Parameter],
    bucket_bytes: int = BUCKET_BYTES,
    kind: Callable[[Tensor], Hashable] = kind_of,
) -> list[list[Parameter]]:
    """Group parameters into buckets, the last registered first: backward makes their gradients first.

    Args:
        parameters: In the order of registration, which is about that of the forward pass. Those that need no
            gradient, and repetitions (tied weights), are left out.
        bucket_bytes: A bucket is closed before it would grow beyond this; a larger parameter has its own.
        kind: Parameters of different kinds never share a bucket.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"a bucket needs room for at least one byte, not {bucket_bytes}")
    unique = dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad)
    buckets: list[list[Parameter]] = []
    open_buckets: dict[Hashable, tuple[list[Parameter], int]] = {}
    for parameter in reversed(unique):
        bucket, filled = open_buckets.get(kind(parameter), ([], bucket_bytes))
        if filled + parameter.nbytes > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[kind(parameter)] = bucket, filled + parameter.nbytes
    return buckets


def padded(count: int, group: Group) -> int:
    """Return `count` raised to the next multiple of the group's size, so that shards are equal."""
    return -(-count // group.size) * group.size


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return one view of `flat` a parameter, side by side, in the parameters' shapes."""
    views, start = [], 0
    for parameter in parameters:
        views.append(flat[start : start + parameter.numel()].view(parameter.shape))
        start += parameter.numel()
    return views


@torch.no_grad()
def flatten(parameters: Sequence[Parameter], group: Group) -> Tensor:
    """Move parameters into one flat tensor, padded with zeros to a multiple of the group's size.

    Afterwards each parameter is a view of it: to write the flat tensor is to write the parameters.
    """
    size = padded(sum(parameter.numel() for parameter in parameters), group)
    flat = parameters[0].new_zeros(size)
    for parameter, view in zip(parameters, views_of(flat, parameters), strict=True):
        view.copy_(parameter)
        parameter.data = view
    return flat


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: Group) -> None:
    """Overwrite `tensors` with those of index 0: one message a dtype. Sends the tensors' bytes, once."""
    if group.size == 1:
        return
    by_kind: dict[Hashable, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in by_kind.values():
        flat = torch.cat([member.reshape(-1) for member in members])
        comm.broadcast(flat, 0, group).wait()
        for member, view in zip(members, views_of(flat, members), strict=True):
            member.copy_(view)
