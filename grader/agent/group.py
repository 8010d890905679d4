"""Process groups that note what they do: which communication a rank waits in, and how many bytes it sends.

The groups stay torch's own, with torch's own backends; their class is replaced by a subclass whose methods take a
note first, so that wrappers, subgroups, device meshes and torch's own C++ code are seen as well.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from grader.agent.waiting import Slot

_PURGE_ABOVE = 8

# Bytes sent by one rank of p. `n`: bytes of the argument that the rank contributes. Ring algorithms where a
# collective has one (Patarasuk and Yuan 2009); a root sends to, or hears from, each of the others.
_Formula = Callable[[int, int, bool], int]
_FORMULAS: dict[str, tuple[str, int, _Formula]] = {
    # method: (name in reports, which argument the rank contributes, formula of n, p, is root)
    "allreduce": ("all_reduce", 0, lambda n, p, _: 2 * (p - 1) * n // p),
    "allreduce_coalesced": ("all_reduce", 0, lambda n, p, _: 2 * (p - 1) * n // p),
    "broadcast": ("broadcast", 0, lambda n, p, root: (p - 1) * n if root else 0),
    "reduce": ("reduce", 0, lambda n, p, root: 0 if root else n),
    "allgather": ("all_gather", 1, lambda n, p, _: (p - 1) * n),
    "allgather_coalesced": ("all_gather", 1, lambda n, p, _: (p - 1) * n),
    "all_gather_single": ("all_gather", 1, lambda n, p, _: (p - 1) * n),
    "_allgather_base": ("all_gather", 1, lambda n, p, _: (p - 1) * n),
    "all_gather_single_coalesced": ("all_gather", 1, lambda n, p, _: (p - 1) * n),
    "allgather_into_tensor_coalesced": ("all_gather", 1, lambda n, p, _: (p - 1) * n),
    "gather": ("gather", 1, lambda n, p, root: 0 if root else n),
    "scatter": ("scatter", 1, lambda n, p, root: (p - 1) * n // p if root else 0),
    "reduce_scatter": ("reduce_scatter", 1, lambda n, p, _: (p - 1) * n // p),
    "reduce_scatter_single": ("reduce_scatter", 1, lambda n, p, _: (p - 1) * n // p),
    "_reduce_scatter_base": ("reduce_scatter", 1, lambda n, p, _: (p - 1) * n // p),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1, lambda n, p, _: (p - 1) * n // p),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, lambda n, p, _: (p - 1) * n // p),
    "all_to_all_single": ("all_to_all", 1, lambda n, p, _: (p - 1) * n // p),
    "alltoall_base": ("all_to_all", 1, lambda n, p, _: (p - 1) * n // p),
    "alltoall": ("all_to_all", 1, lambda n, p, _: (p - 1) * n // p),
    "send": ("send", 0, lambda n, p, _: n),
    "recv": ("recv", 0, lambda n, p, _: 0),
    "recv_anysource": ("recv_anysource", 0, lambda n, p, _: 0),
    "barrier": ("barrier", 0, lambda n, p, _: 0),
}
_OLD_NAMES = {  # deprecated names that forward to the new one where a torch has both
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


@dataclass(slots=True)
class Recorder:
    """Notes one rank's communication.

    Attributes:
        source_root: Files below it are the student's; the innermost of their frames is named.
        bytes_sent: So far, by this rank.
        failed: The error with which a communication ended, and what it was.
    """

    slot: Slot
    source_root: str
    bytes_sent: int = 0
    failed: tuple[BaseException, dict[str, Any]] | None = None
    _pending: dict[int, tuple[Any, dict[str, Any]]] = field(default_factory=dict)

    def issue(self, work: Any, note: dict[str, Any]) -> None:
        """Remember what a started communication is, until it is waited for."""
        if len(self._pending) > _PURGE_ABOVE:
            done = [key for key, (other, _) in self._pending.items() if other.is_completed()]
            for key in done:
                del self._pending[key]
        if work is not None:
            self._pending[id(work)] = (work, note)

    def note_of(self, work: object) -> dict[str, Any]:
        """Return what a communication is that is now waited for."""
        return self._pending.pop(id(work), (None, {"operation": "communication"}))[1]

    @contextlib.contextmanager
    def waiting(self, note: Mapping[str, Any]) -> Iterator[None]:
        """Say that the rank waits for something."""
        self.slot.write({**note, "state": "waiting", "where": self._where()})
        try:
            with self.naming_failure(note):
                yield
        finally:
            self.slot.write({**note, "state": "running"})

    @contextlib.contextmanager
    def naming_failure(self, note: Mapping[str, Any]) -> Iterator[None]:
        """Remember which communication an error came from."""
        try:
            yield
        except RuntimeError as error:
            self.failed = (error, dict(note))
            raise

    def _where(self) -> str:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.source_root):
                return f"{name[len(self.source_root) :].lstrip('/')}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def install(recorder: Recorder) -> None:
    """Make every group of this process note what it does. To be called before the first group is made."""
    base = c10d.ProcessGroup
    methods = {
        name: _noting(recorder, base, name)
        for name in _FORMULAS
        if hasattr(base, name) and not hasattr(base, _OLD_NAMES.get(name, "no such name"))
    }
    recording = type("ProcessGroup", (base,), {"__init__": _without_store(base), **_twin_methods(base), **methods})
    setattr(c10d, "ProcessGroup", recording)  # noqa: B010 - replacing torch's class is the point, which an assignment would hide from the type checker
    setattr(c10d.Work, "wait", _noting_wait(recorder, c10d.Work.wait))  # noqa: B010 - as above
    made = c10d._new_group_with_tag
    setattr(c10d, "_new_group_with_tag", _noting_new_group(recorder, made))  # noqa: B010 - as above


def _without_store(base: Any) -> Callable[..., None]:
    def initialise(self: Any, *arguments: Any) -> None:
        base.__init__(self, *arguments[-2:])  # a Python subclass is made from rank and size alone
        self.plain = base(*arguments[-2:])

    return initialise


def _twin_methods(base: Any) -> dict[str, Callable[..., Any]]:
    """Give a plain twin every backend and name that the recording group is given.

    Collectives are called on the twin: torch holds the interpreter's lock while it calls one on a Python subclass, and
    gloo's own thread may hold gloo's lock while it waits for the interpreter's, to free a tensor. Each would then wait
    for the other for ever, in code that is right.
    """

    def both(name: str) -> Callable[..., Any]:
        method = getattr(base, name)

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            method(self.plain, *arguments, **options)
            return method(self, *arguments, **options)

        return call

    names = (
        "_set_default_backend",
        "_register_backend",
        "_set_group_name",
        "_set_group_desc",
        "_enable_collectives_timing",
    )
    return {name: both(name) for name in names if hasattr(base, name)}


def _noting(recorder: Recorder, base: Any, name: str) -> Callable[..., Any]:
    operation, contributed, formula = _FORMULAS[name]
    method = getattr(base, name)

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        values = [*arguments, *options.values()]
        note = {"operation": operation, **_participants(self, operation, values)}
        size = _bytes(values[contributed]) if len(values) > contributed else 0
        recorder.bytes_sent += formula(size, self.size(), note.get("group_peer") == self.rank())
        with recorder.naming_failure(note):
            work = method(self.plain, *arguments, **options)
        recorder.issue(work, note)
        return work

    # torch's dispatch back into Python stops at a frame of the method's own name.
    noted.__code__ = noted.__code__.replace(co_name=name)
    return noted


def _noting_wait(recorder: Recorder, wait: Callable[..., Any]) -> Callable[..., Any]:
    def noted(work: Any, *arguments: Any, **options: Any) -> Any:
        with recorder.waiting(recorder.note_of(work)):
            return wait(work, *arguments, **options)

    return noted


def _noting_new_group(recorder: Recorder, made: Callable[..., Any]) -> Callable[..., Any]:
    def noted(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        with recorder.waiting({"operation": "new_group", "ranks": None if ranks is None else list(ranks)}):
            return made(ranks, *arguments, **options)

    return noted


def _participants(group: Any, operation: str, values: list[Any]) -> dict[str, Any]:
    ranks = c10d._world.pg_group_ranks.get(group) or {rank: rank for rank in range(group.size())}
    members = {index: rank for rank, index in ranks.items()}
    peer = _peer(operation, values)
    return {
        "ranks": sorted(ranks),
        "peer": None if peer is None else members.get(peer, peer),
        "group_peer": peer,
    }


def _peer(operation: str, values: list[Any]) -> int | None:
    if operation in {"send", "recv"}:
        return int(values[1])
    if operation in {"broadcast", "reduce", "scatter", "gather"}:
        for value in values[1:]:
            if isinstance(value, int):
                return value
            if hasattr(value, "rootRank"):
                return int(value.rootRank)
    return None


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(part) for part in value)
    return 0
