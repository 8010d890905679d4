"""Runs a function on several ranks of this machine: `run(4, function, *arguments)` returns what each rank returned.

With one rank there is no group of processes: that is serial training. What a rank returns must be detached tensors, or
plain values.
"""

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from parallel import comm

PATIENCE_S = 60.0


def run(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(group, *arguments)` on each of `world_size` ranks.

    Raises:
        AssertionError: A rank failed, with its traceback, or did not return in time.
    """
    fork = multiprocessing.get_context("fork")  # torch is imported once, here, and not again in every rank
    results: Any = fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        call = (world_size, os.path.join(folder, "store"), results, function, arguments)
        processes = [fork.Process(target=_rank, args=(rank, *call), daemon=True) for rank in range(world_size)]
        for process in processes:
            process.start()
        try:
            return _collect(results, world_size)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(
    rank: int, world_size: int, store: str, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    group = comm.ALONE
    try:
        if world_size > 1:
            meeting = torch.distributed.FileStore(store, world_size)
            group = comm.start("gloo", store=meeting, rank=rank, world_size=world_size, timeout_s=PATIENCE_S)
        answer = function(group, *arguments)
        results.put((rank, True, _as_lists(answer)))
        comm.barrier(group)  # a rank that leaves early would break what its peers still send
        time.sleep(PATIENCE_S)  # the queue's thread sends the answer; the parent ends this process
    except Exception:  # noqa: BLE001  (whatever it is, the parent shows it)
        results.put((rank, False, traceback.format_exc()))
        time.sleep(PATIENCE_S)


def _collect(results: Any, world_size: int) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(answers) < world_size:
        try:
            rank, succeeded, answer = results.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            missing = sorted(set(range(world_size)) - set(answers))
            raise AssertionError(f"ranks {missing} of {world_size} did not return: do all ranks take part?") from None
        assert succeeded, f"rank {rank} failed:\n{answer}"
        answers[rank] = _as_tensors(answer)
    return [answers[rank] for rank in range(world_size)]


def _as_lists(answer: Any) -> Any:
    """Tensors travel as plain data: their memory would be gone with the process."""
    if isinstance(answer, torch.Tensor):
        return ("tensor", str(answer.dtype).removeprefix("torch."), answer.tolist())
    if isinstance(answer, dict):
        return {name: _as_lists(value) for name, value in answer.items()}
    return answer


def _as_tensors(answer: Any) -> Any:
    if isinstance(answer, tuple) and len(answer) == 3 and answer[0] == "tensor":
        return torch.tensor(answer[2], dtype=getattr(torch, answer[1]))
    if isinstance(answer, dict):
        return {name: _as_tensors(value) for name, value in answer.items()}
    return answer
