"""Tensors as bytes that cross the trust line: safetensors both ways, everything from a rank checked first."""

import struct
from collections.abc import Mapping

import safetensors
import safetensors.torch
from torch import Tensor

_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8"})
_MAX_TENSORS = 10_000
_MAX_HEADER_BYTES = 4 << 20
_MAX_DIMENSIONS = 16


class TensorFormatError(Exception):
    """Bytes that are not the tensors that they should be. Whoever sent them is to blame."""


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as a safetensors file. Views and tensors that share memory are copied."""
    apart = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(apart)


def unpack(data: bytes) -> dict[str, Tensor]:
    """Read a safetensors file that foreign code has written. Values may be anything, `nan` included.

    Raises:
        TensorFormatError: It is none, or it has more tensors, dimensions or other dtypes than it may have.
    """
    if len(data) < 8 or struct.unpack("<Q", data[:8])[0] > _MAX_HEADER_BYTES:
        raise TensorFormatError("the tensors' header is missing or too long")
    try:
        listed = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # it ships without types
    except (safetensors.SafetensorError, ValueError) as error:
        raise TensorFormatError(f"the tensors are not in the safetensors format: {error}") from error
    if len(listed) > _MAX_TENSORS:
        raise TensorFormatError(f"{len(listed)} tensors came, at most {_MAX_TENSORS} may")
    for name, tensor in listed:
        if tensor["dtype"] not in _DTYPES:
            raise TensorFormatError(f"tensor {name[:200]!r} has the dtype {tensor['dtype']}")
        if len(tensor["shape"]) > _MAX_DIMENSIONS:
            raise TensorFormatError(f"tensor {name[:200]!r} has {len(tensor['shape'])} dimensions")
    return safetensors.torch.load(data)
