"""One child process: how it is laid out before foreign code runs, and how several are watched to their end."""

import contextlib
import os
import select
import signal
import stat
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from grader.agent import privileges, streams
from grader.errors import SandboxError

INPUT, RESULT, SETUP = 3, 4, 5  # a child's descriptors beside the standard three
_READY = b"+"
_HANGUP = select.POLLHUP | select.POLLERR | select.POLLNVAL
_MOST_CHUNKS_IN_A_PIPE = 64  # a pipe holds at most 1 MiB, or 16 of them where it was made larger
TICK_S = 0.05


@dataclass(slots=True, kw_only=True)
class Child:
    """A child process, and what has come from it so far.

    Attributes:
        input: Where to write what it reads at `INPUT`; closing it lets the child go on.
        status: As `os.waitpid` gives it, once it has ended.
        peak_bytes: The most memory that was resident at once, once it has ended.
        killed_by_us: It had not ended by itself when the case was over.
        kills_before: How many processes had been killed for memory when it started.
        ended: Nothing that it started lives any more, and all that it sent has been taken.
    """

    pid: int
    user: int | None
    pidfd: int
    input: int
    setup: int
    stdout: streams.Log
    stderr: streams.Log
    setup_log: streams.Log
    result: streams.Store
    open: dict[int, streams.Sink]
    started_at: float
    status: int | None = None
    ended_at: float = 0.0
    peak_bytes: int = 0
    ended: bool = False
    killed_by_us: bool = False
    kills_before: int = field(default_factory=privileges.kills_for_memory)

    @property
    def running(self) -> bool:
        """Whether its end has not been seen yet."""
        return self.status is None

    @property
    def exit_code(self) -> int | None:
        """Its own exit code, or minus the signal's number, or None while it runs."""
        return None if self.status is None else os.waitstatus_to_exitcode(self.status)

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel killed it because the sandbox's memory was used up. To be asked once it has ended."""
        killed = self.exit_code == -signal.SIGKILL and not self.killed_by_us
        return killed and privileges.kills_for_memory() > self.kills_before

    def collect(self) -> None:
        """Note how it ended. Blocks until it has."""
        if self.running:
            _, self.status, usage = os.wait4(self.pid, 0)
            self.ended_at = time.monotonic()
            self.peak_bytes = usage.ru_maxrss * 1024

    def let_go(self) -> None:
        """Let it leave the barrier before foreign code."""
        streams.close_quietly(self.input)
        self.input = -1

    def close(self) -> None:
        """Close every descriptor that belongs to it."""
        for descriptor in (*self.open, self.pidfd, self.input):
            if descriptor >= 0:
                streams.close_quietly(descriptor)
        self.result.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and as whom a child runs. `folder` is made by the child itself, private to its user."""

    folder: str
    user: int | None
    limits: privileges.Limits
    max_result_bytes: int = 0


def spawn(setting: Setting, body: Callable[[], NoReturn]) -> Child:
    """Fork a child that lays itself out and then calls `body`, which must read `INPUT` to its end first."""
    pipes = {name: streams.pipe() for name in ("input", "result", "setup", "stdout", "stderr")}
    pid = os.fork()
    if pid == 0:
        _enter(setting, body, pipes)
    for name, (reading, writing) in pipes.items():
        os.close(reading if name == "input" else writing)
    return _child(setting, pid, {name: reading for name, (reading, _) in pipes.items()}, pipes["input"][1])


def _child(setting: Setting, pid: int, reading: dict[str, int], input_pipe: int) -> Child:
    logs = {name: streams.Log(setting.limits.log_bytes) for name in ("stdout", "stderr")}
    setup_log, result = streams.Log(4096), streams.Store(setting.max_result_bytes)
    sinks: dict[str, streams.Sink] = {**logs, "setup": setup_log, "result": result}
    for name in sinks:
        os.set_blocking(reading[name], False)
    return Child(
        pid=pid,
        user=setting.user,
        pidfd=streams.high(os.pidfd_open(pid)),
        input=input_pipe,
        setup=reading["setup"],
        stdout=logs["stdout"],
        stderr=logs["stderr"],
        setup_log=setup_log,
        result=result,
        open={reading[name]: sink for name, sink in sinks.items()},
        started_at=time.monotonic(),
    )


def _enter(setting: Setting, body: Callable[[], NoReturn], pipes: dict[str, tuple[int, int]]) -> NoReturn:
    """The child's side: whatever happens, control never returns into the agent's own frames."""
    try:
        os.setsid()
        _lay_out_descriptors(pipes)
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        privileges.become(setting.user)
        os.mkdir(setting.folder, 0o700)
        os.chdir(setting.folder)
        privileges.apply_limits(setting.limits, own_user=setting.user is not None)
        os.write(SETUP, _READY)
        body()
    except BaseException:  # noqa: BLE001 - the outermost edge of this process; what failed is told to the agent
        with contextlib.suppress(OSError):
            os.write(SETUP, traceback.format_exc(limit=-4).encode()[-2048:])
    finally:
        os._exit(125)


def _lay_out_descriptors(pipes: dict[str, tuple[int, int]]) -> None:
    nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.dup2(pipes["stdout"][1], 1)
    os.dup2(pipes["stderr"][1], 2)
    os.dup2(pipes["input"][0], INPUT, inheritable=False)
    os.dup2(pipes["result"][1], RESULT, inheritable=False)
    os.dup2(pipes["setup"][1], SETUP, inheritable=False)
    os.closerange(SETUP + 1, os.sysconf("SC_OPEN_MAX"))


def wait_ready(children: Sequence[Child]) -> None:
    """Wait until every child stands at the barrier before foreign code.

    Raises:
        SandboxError: One could not lay itself out.
    """
    for child in children:
        os.set_blocking(child.setup, True)
        said = os.read(child.setup, 4096)
        os.set_blocking(child.setup, False)
        if said != _READY:
            raise SandboxError(f"a process could not be prepared: {said.decode('utf-8', 'replace').strip()}")


@dataclass(slots=True)
class Watch:
    """Watches children until all have ended, the time is over, or `tick` says that it is enough.

    Attributes:
        host: The descriptor whose hang-up means that nobody waits for the outcome any more.
        tick: Called about every 50 ms; a text that is not empty ends the watch and is its outcome.
    """

    children: Sequence[Child]
    host: int
    tick: Callable[[], str] = field(default=lambda: "")

    def run(self, deadline: float) -> str:
        """Return `finished`, `timeout`, or what `tick` said.

        Raises:
            EOFError: The host is gone.
        """
        poll = self._poll()
        while any(child.running for child in self.children):
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            self._handle(poll, min(TICK_S, deadline - now))
            if outcome := self.tick():
                return outcome
        return "finished"

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self.host, 0)
        for child in self.children:
            for descriptor in child.open:
                poll.register(descriptor, select.POLLIN)
            if child.running:
                poll.register(child.pidfd, select.POLLIN)
        return poll

    def _handle(self, poll: select.poll, wait_s: float) -> None:
        owners = {descriptor: child for child in self.children for descriptor in child.open}
        ends = {child.pidfd: child for child in self.children}
        for descriptor, event in poll.poll(wait_s * 1000):
            if descriptor == self.host and event & _HANGUP:
                raise EOFError
            if descriptor in owners:
                _take(owners[descriptor], descriptor, poll)
            elif descriptor in ends:
                poll.unregister(descriptor)
                ends[descriptor].collect()


def _take(child: Child, descriptor: int, poll: select.poll) -> None:
    if not child.open[descriptor].take_from(descriptor):
        poll.unregister(descriptor)
        del child.open[descriptor]
        os.close(descriptor)


def _drain(child: Child) -> None:
    """Take what is left in the pipes of a child of which nothing lives any more."""
    for descriptor, sink in child.open.items():
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        for _ in range(_MOST_CHUNKS_IN_A_PIPE):
            if not poll.poll(0) or not sink.take_from(descriptor):
                break


def end(children: Sequence[Child]) -> None:
    """Kill what is left of the children, of their users and of all that they started; then drain their pipes.

    Harmless when repeated.

    Raises:
        SandboxError: Something could not be ended.
    """
    if all(child.ended for child in children):
        return
    for child in children:
        if child.running:
            child.killed_by_us = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
    users = {child.user for child in children if child.user is not None}
    privileges.end_users(users, {child.pid for child in children})
    for child in children:
        child.collect()
    privileges.end_descendants()
    for child in children:
        _drain(child)
        child.ended = True


def open_regular(folder: int, name: str) -> int:
    """Open a regular file in a folder that foreign code has filled.

    Raises:
        OSError: It is missing, a link, or no regular file.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is no regular file")
    return descriptor


@contextlib.contextmanager
def ended(children: list[Child]) -> Iterator[list[Child]]:
    """Whatever happens inside, nothing of the children is left behind, and no descriptor either."""
    try:
        yield children
    finally:
        end(children)
        for child in children:
            child.close()
