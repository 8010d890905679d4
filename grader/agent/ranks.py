"""Forks the ranks of one case, hands each its own inputs, and says how each of them ended and what it waited for."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grader.agent import process, streams
from grader.agent.command import ending_of
from grader.agent.folders import Case
from grader.agent.host import Host
from grader.agent.privileges import Limits
from grader.agent.process import Child, Setting
from grader.agent.waiting import Slot, Standstill, describe
from grader.errors import SandboxError

HANG_SIGNAL = signal.SIGUSR1  # makes a rank print where it is
_GRACE_S = 0.5  # for the other ranks to end by themselves, once one has failed
_SHOW_S = 0.2  # for hanging ranks to print where they are


class Body(Protocol):
    """`rank.run` and `rank.Job`, handed in so that this module does not import torch."""

    def __call__(self, *, store: str, rank: int, slot: Slot) -> Any:
        """Be that rank; never return."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A `run_ranks` request."""

    id: int
    world_size: int
    timeout_s: float
    limits: Limits
    max_result_bytes: int

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> "Request":
        """Read the request."""
        return cls(
            id=int(header["id"]),
            world_size=int(header["world_size"]),
            timeout_s=float(header["timeout_s"]),
            limits=Limits.from_header(header["limits"]),
            max_result_bytes=int(header["max_result_bytes"]),
        )


@dataclass(slots=True)
class Ranks:
    """The ranks of one case while they run."""

    children: Sequence[Child]
    slots: Sequence[Slot]
    first_failure: int | None = None
    waited_for: list[str] = field(default_factory=list)
    _failed_at: float = 0.0
    _standstill: Standstill = field(default_factory=Standstill)

    def tick(self) -> str:
        """Return why the case is over before all ranks have ended, or an empty string."""
        if any(child.result.overflowed for child in self.children):
            return "result_too_large"
        if self.first_failure is None:
            self._look_for_failure()
        busy = [rank for rank, child in enumerate(self.children) if child.running and not self.finished(rank)]
        if self.first_failure is not None:
            return "failed" if not busy or time.monotonic() - self._failed_at > _GRACE_S else ""
        if not busy:
            return "finished"
        return "deadlock" if self._standstill.seen([self._observed(rank) for rank in busy]) else ""

    def finished(self, rank: int) -> bool:
        """Whether a rank says that its result is written; it then stays until the case is over."""
        return self.slots[rank].read().get("state") == "finished"

    def _observed(self, rank: int) -> tuple[int, Slot]:
        return self.children[rank].pid, self.slots[rank]

    def _look_for_failure(self) -> None:
        ended = [(c.ended_at, rank) for rank, c in enumerate(self.children) if not c.running and _failed(c)]
        if ended:
            self._failed_at, self.first_failure = min(ended)
            self.note_waits()

    def note_waits(self) -> None:
        """Note what each rank waits for now; only the first time counts."""
        if not self.waited_for:
            self.waited_for = [
                describe(slot.read()) if child.running else ""
                for child, slot in zip(self.children, self.slots, strict=True)
            ]

    def show_where(self) -> None:
        """Let the ranks that hang outside of any communication print their stacks."""
        for child, waits in zip(self.children, self.waited_for, strict=True):
            if child.running and not waits:
                os.kill(child.pid, HANG_SIGNAL)


def _failed(child: Child) -> bool:
    if child.exit_code != 0:
        return True
    ready = any(sink is child.result for sink in child.open.values())  # its frame is still in the pipe
    return not ready and child.result.size == 0


def run(request: Request, *, root: str, users: Sequence[int | None], host: Host, body: Body) -> None:
    """Run one case and send `ranks_finished`.

    Args:
        request: What to run.
        root: The folder for private folders.
        users: The user of each rank.
        host: Where a frame of inputs a rank stands next, and where the answer goes.
        body: What a rank does after the fork.

    Raises:
        SandboxError: The ranks could not be prepared, or their remains could not be ended.
        EOFError: The host is gone.
    """
    with Case(root) as case:
        slots = [Slot() for _ in users]
        store = _make_store(case)
        with process.ended([]) as children:
            for rank, user in enumerate(users):
                setting = Setting(
                    folder=case.folder(f"rank{rank}", user),
                    user=user,
                    limits=request.limits,
                    max_result_bytes=request.max_result_bytes,
                )
                children.append(process.spawn(setting, _only(slots, rank, store, body)))
            process.wait_ready(children)
            case.seal()
            for rank, child in enumerate(children):
                streams.forward(host.source, child.input, host.next_inputs(rank))
                child.let_go()
            ranks = Ranks(children, slots)
            ending = _watch(ranks, host, request.timeout_s)
            process.end(children)
            _send(request, ranks, ending, host)
        for slot in slots:
            slot.close()


def _make_store(case: Case) -> str:
    path = f"{case.path}/store"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
    os.chmod(path, 0o666)  # noqa: S103 - the ranks are different users, and meet through this file
    return path


def _only(slots: Sequence[Slot], rank: int, store: str, body: Body) -> Callable[[], Any]:
    def start() -> Any:
        for other, slot in enumerate(slots):
            if other != rank:
                slot.close()  # or ranks could exchange data through each other's notes
        return body(store=store, rank=rank, slot=slots[rank])

    return start


def _watch(ranks: Ranks, host: Host, timeout_s: float) -> str:
    started = time.monotonic()
    for child in ranks.children:
        child.started_at = started
    ending = process.Watch(ranks.children, host.source, ranks.tick).run(started + timeout_s)
    ranks.note_waits()
    if ending == "timeout":
        ranks.show_where()
        process.Watch(ranks.children, host.source).run(time.monotonic() + _SHOW_S)
    return ending


def _send(request: Request, ranks: Ranks, ending: str, host: Host) -> None:
    for child in ranks.children:
        if child.setup_log.total:
            raise SandboxError(f"a rank could not be started: {child.setup_log.text()}")
    stores = [child.result for child in ranks.children if not child.result.overflowed]
    logs = [child.stdout.kept() for child in ranks.children] + [c.stderr.kept() for c in ranks.children]
    header = {
        "kind": "ranks_finished",
        "id": request.id,
        "ending": ending,
        "first_failure": ranks.first_failure,
        "ranks": [_report(ranks, rank) for rank in range(len(ranks.children))],
    }
    host.answer(header, sum(store.size for store in stores) + sum(len(log) for log in logs))
    for store in stores:
        store.send_to(host.target)
    streams.write_all(host.target, b"".join(logs))


def _report(ranks: Ranks, rank: int) -> dict[str, Any]:
    child = ranks.children[rank]
    how, exit_code = ending_of("", child), child.exit_code
    if child.killed_by_us:
        how, exit_code = ("exited", 0) if ranks.finished(rank) else ("ended", None)
    return {
        "rank": rank,
        "ending": how,
        "exit_code": exit_code,
        "duration_s": child.ended_at - child.started_at,
        "result_bytes": 0 if child.result.overflowed else child.result.size,
        "stdout_bytes": len(child.stdout.kept()),
        "stderr_bytes": len(child.stderr.kept()),
        "truncated": child.stdout.truncated or child.stderr.truncated,
        "peak_bytes": child.peak_bytes,
        "out_of_memory": child.out_of_memory,
        "waiting_for": ranks.waited_for[rank],
        "too_large": child.result.overflowed,
    }
