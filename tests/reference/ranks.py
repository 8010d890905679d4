"""Run a function on several ranks: fork after torch is imported, meet over a file, return each rank's result.

    results = ranks.run(4, function, *arguments)     # function(group, *arguments) on each rank -> list by rank
    expected = ranks.alone(function, *arguments)     # the same in one process, without a world: the serial oracle

Functions may be closures. What a rank returns travels back pickled, so tensors must be detached. A failure on any rank
is raised here with that rank's traceback; a rank that hangs is killed and named.

Never run a backward pass in the test's own process: autograd refuses to work in processes forked after it. Use
`alone` for the serial side.
"""

import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # optimizers and hooks import it on first use: once here, not once a rank (3 s each)
import torch.distributed as dist

from reference import comm

TIMEOUT_S = 60.0


class RankError(AssertionError):
    """At least one rank failed, hung or died."""


def run(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Call `function(group, *arguments)` on `world_size` ranks and return what each returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        return _forked(world_size, lambda rank: _joined(rank, world_size, store, function, arguments), timeout_s)


def alone(function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S) -> Any:
    """Call `function(group, *arguments)` in one forked process that has joined no world."""
    return _forked(1, lambda _: function(comm.ALONE, *arguments), timeout_s)[0]


def _joined(rank: int, world_size: int, store: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    comm.start(
        "gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size, timeout_s=TIMEOUT_S
    )
    result = function(comm.Group.of(dist.group.WORLD) if world_size > 1 else comm.ALONE, *arguments)
    dist.barrier()  # no rank leaves while a peer still reads from it
    return result


def _forked(count: int, call: Callable[[int], Any], timeout_s: float) -> list[Any]:
    sys.stdout.flush()
    sys.stderr.flush()
    pipes: dict[int, int] = {}
    children: dict[int, int] = {}
    for rank in range(count):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _answer(call, rank, writer)
        os.close(writer)
        pipes[reader], children[rank] = rank, child
    try:
        return _collect(pipes, count, timeout_s)
    finally:
        for child in children.values():
            os.kill(child, signal.SIGKILL)  # done or given up on; a zombie takes no harm
            os.waitpid(child, 0)
        for reader in pipes:
            os.close(reader)


def _answer(call: Callable[[int], Any], rank: int, writer: int) -> NoReturn:
    torch.set_num_threads(1)
    try:
        answer = pickle.dumps((True, call(rank)))
    except BaseException:  # noqa: BLE001 (the whole point is to carry any failure to the parent)
        answer = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no interpreter shutdown: it would wait for gloo's threads


def _collect(pipes: dict[int, int], count: int, timeout_s: float) -> list[Any]:
    """Read every pipe to its end. The first failure ends the wait, since its peers may wait for it for ever."""
    received: dict[int, bytearray] = {rank: bytearray() for rank in range(count)}
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while pipes:
        ready, _, _ = select.select(list(pipes), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(pipes.values())} of {count} had not finished after {timeout_s} s")
        for reader in ready:
            piece = os.read(reader, 1 << 20)
            received[pipes[reader]] += piece
            if not piece:
                os.close(reader)
                rank = pipes.pop(reader)
                results[rank] = _opened(rank, received[rank])
    return [results[rank] for rank in range(count)]


def _opened(rank: int, answer: bytearray) -> Any:
    if not answer:
        raise RankError(f"rank {rank} died without an answer")
    succeeded, result = pickle.loads(answer)  # our own child wrote it
    if not succeeded:
        raise RankError(f"rank {rank} failed:\n{result}")
    return result
