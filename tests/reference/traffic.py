"""What a rank sends, counted in two ways that know nothing of our formulas.

* `Traffic` sees every collective and message that torch dispatches, with its tensors: exact bytes of messages, and
  calls. A native collective is counted at the bytes of a ring, which is what NCCL and gloo use for large tensors.
* `loopback_bytes` asks the kernel what went over the loopback of a private network namespace.
"""

import ctypes
import fcntl
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference import comm
from reference.comm import Group
from tests.reference import ranks

_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


@dataclass(frozen=True)
class Call:
    """One operation: its name in c10d, the bytes of its tensors, and the size of its group."""

    name: str
    tensor_bytes: int
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends."""
        shares = {"send": 1.0, "recv_": 0.0, "barrier": 0.0, "allreduce_": 2 * (self.ranks - 1) / self.ranks}
        return shares[self.name] * self.tensor_bytes


class Traffic(TorchDispatchMode):
    """Records the calls made inside; a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            group = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject) and _is_group(leaf))
            size = dist.ProcessGroup.unbox(group).size()
            self.calls.append(Call(func._schema.name.removeprefix("c10d::"), sum(t.nbytes for t in tensors), size))
        return func(*args, **(kwargs or {}))

    @property
    def sent(self) -> float:
        """Bytes that this rank sent."""
        return sum(call.sent for call in self.calls)

    def count(self, name: str) -> int:
        """Return how many calls of that name there were."""
        return sum(call.name == name for call in self.calls)


def _is_group(leaf: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(leaf._type())


def loopback_bytes(world_size: int, function: Callable[..., Any], *arguments: Any) -> int:
    """Call `function(group, *arguments)` on ranks that share a network of their own; return the bytes they sent.

    `function` is called twice, and the second time is measured.
    """
    return int(ranks.alone(_in_private_network, world_size, function, arguments))


def _in_private_network(_: Group, world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace: needs CAP_SYS_ADMIN or unprivileged user namespaces")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = struct.pack("16sh", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(control, _SIOCSIFFLAGS, flags)
    measured: list[int] = ranks.run(world_size, _measured, function, arguments)
    return measured[0]


def _measured(group: Group, function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    function(group, *arguments)
    before = _settled_counter(group)
    function(group, *arguments)
    return _settled_counter(group) - before


def _settled_counter(group: Group) -> int:
    comm.barrier(group)
    time.sleep(0.05)
    counter = _counter()
    comm.barrier(group)
    return counter


def _counter() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])
