"""What a process gives up before it runs foreign code, and how all that is left of it is ended."""

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grader.errors import SandboxError

_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAP_SETGID, _CAP_SETUID = 6, 7
_LAST_CAPABILITY = 63
_LIBC = ctypes.CDLL(None, use_errno=True)
_END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program, or one rank, may use.

    Attributes:
        memory_bytes: Private writable memory, beyond what the process has when it starts.
        processes: Processes and threads of its user; where it has no user of its own the sandbox's limit holds.
        file_bytes: Any one file it writes.
        open_files: Descriptors.
        log_bytes: What is kept of each of standard output and standard error.
    """

    memory_bytes: int
    processes: int
    file_bytes: int
    open_files: int
    log_bytes: int

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> "Limits":
        """Read the limits of a request."""
        return cls(**{name: int(header[name]) for name in cls.__slots__})


def harden_agent() -> None:
    """Keep this process from being traced by others of its user, and make it the parent of all orphans."""
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.umask(0o077)


def may_switch_users() -> bool:
    """Whether this process can become any other user."""
    effective = int(_status("CapEff"), 16)
    return os.geteuid() == 0 and all(effective >> bit & 1 for bit in (_CAP_SETGID, _CAP_SETUID))


def become(user: int | None) -> None:
    """Become `user` for good (None: stay the same user), and never gain a privilege again.

    Raises:
        SandboxError: Some privilege is left.
    """
    with contextlib.suppress(OSError):  # the first to be ended when memory runs out
        write_file("/proc/self/oom_score_adj", b"1000")
    if user is not None:
        for capability in range(_LAST_CAPABILITY + 1):
            # Refused where the container keeps CAP_SETPCAP back; without new privileges the set is then inert.
            _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if user is not None:
        _verify(user)
    _prctl(_PR_SET_DUMPABLE, 1)  # or the libraries of this process could not open their own /proc/self


def _verify(user: int) -> None:
    if os.getresuid() != (user,) * 3 or os.getresgid() != (user,) * 3 or os.getgroups():
        raise SandboxError(f"the process kept ids of another user than {user}")
    if _status("NoNewPrivs") != "1":
        raise SandboxError("the process may still gain privileges")
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        if int(_status(name), 16):
            raise SandboxError(f"the process kept capabilities: {name} is {_status(name)}")
    with contextlib.suppress(PermissionError):
        os.setresuid(0, 0, 0)
        raise SandboxError("the process could become root again")


def apply_limits(limits: Limits, *, own_user: bool) -> None:
    """Set the resource limits of this process. To be called after `become`."""
    data_kib = int(_status("VmData").split()[0])
    _limit(resource.RLIMIT_DATA, data_kib * 1024 + limits.memory_bytes)
    if own_user:
        _limit(resource.RLIMIT_NPROC, limits.processes)
    _limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def end_users(users: Collection[int], children: Collection[int]) -> None:
    """Kill every process of `users`, however many and however quickly they fork.

    Args:
        users: User ids that foreign code has run as; never the agent's own.
        children: Process ids that the caller will wait for itself.

    Raises:
        SandboxError: No process could be started or finished that ends them.
    """
    deadline = time.monotonic() + _END_S
    while users:
        # kill(-1) by a process of that user reaches all others of it in one step, so that none can fork away.
        with contextlib.suppress(BlockingIOError):  # a fork bomb has filled the sandbox; thin it below
            if wait_or_kill(_fork_ender(users), 1.0):
                return
        _kill_each_of(users, children)
        if time.monotonic() > deadline:
            raise SandboxError(f"the processes of the users {sorted(users)} could not be ended")


def _fork_ender(users: Collection[int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            for user in users:
                with acting_as(user), contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    return pid


@contextlib.contextmanager
def acting_as(user: int) -> Iterator[None]:
    """Be `user` for a while, with the way back to root. Never around foreign code."""
    os.setresuid(user, user, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def wait_or_kill(pid: int, seconds: float) -> bool:
    """Wait for a helper of ours. False where it failed, or had to be killed (others may have stopped it)."""
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(pidfd)


def _kill_each_of(users: Collection[int], children: Collection[int]) -> None:
    for pid in _processes():
        with contextlib.suppress(OSError):
            if int(read_file(f"/proc/{pid}/status").partition(b"\nUid:\t")[2].split()[0]) in users:
                os.kill(pid, signal.SIGKILL)
                if pid not in children:
                    os.waitpid(pid, os.WNOHANG)


def end_descendants() -> None:
    """Kill and reap every process that descends from this one. The caller has waited for its own children.

    Raises:
        SandboxError: Something is left after ten seconds.
    """
    deadline = time.monotonic() + _END_S
    while descendants := _descendants():
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        if time.monotonic() > deadline:
            raise SandboxError(f"processes {sorted(descendants)} could not be ended")
        time.sleep(0.002)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants() -> set[int]:
    parents = {}
    for pid in _processes():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[pid] = int(stat_fields(f"/proc/{pid}/stat")[1])
    found: set[int] = set()
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def kills_for_memory() -> int:
    """Return how many processes the kernel has killed so far because this sandbox's memory was used up."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in read_file(path).decode("ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def threads_of(pid: int) -> list[int]:
    """Return the ids of a process's threads.

    Raises:
        OSError: It has ended.
    """
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def stat_fields(path: str) -> list[str]:
    """Return the fields of a `/proc/.../stat` file that follow the name: state, parent, group, ..."""
    return read_file(path).rpartition(b")")[2].decode("ascii").split()


def read_file(path: str) -> bytes:
    """Return a small file's bytes."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def write_file(path: str, data: bytes) -> None:
    """Write a small file."""
    with open(path, "wb", buffering=0) as file:
        file.write(data)


def _status(name: str) -> str:
    for line in read_file("/proc/self/status").decode("ascii", "replace").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    raise SandboxError(f"/proc/self/status has no line {name}, which every supported Linux kernel writes")


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise SandboxError(f"prctl {option} failed: {os.strerror(number)}")
