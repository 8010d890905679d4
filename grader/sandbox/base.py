"""What every sandbox promises. `local` and `docker` keep it, and one conformance suite holds them to it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from types import TracebackType
from typing import BinaryIO, Protocol, Self

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sandbox may use. Bytes are bytes, times are seconds of wall clock unless said."""

    memory_bytes: int = 4096 * MEBIBYTE
    scratch_bytes: int = 1024 * MEBIBYTE  # the writable space, all of it together
    shared_memory_bytes: int = 256 * MEBIBYTE
    file_bytes: int = 512 * MEBIBYTE  # any one file
    processes: int = 256
    open_files: int = 1024
    cpus: float = 2.0
    log_bytes: int = 1 * MEBIBYTE  # of each of standard output and standard error; the rest is counted and dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """What to make. `image` is ignored by the local kind; `gpus` is the number of whole devices."""

    image: str = ""
    limits: Limits = field(default_factory=Limits)
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_user_switch: bool = False  # keep the capabilities with which an agent changes users and ends ranks
    label: str = ""  # which grading it belongs to


class Ending(StrEnum):
    """How a program in a sandbox ended."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"  # by a signal that nobody here sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A program that has ended. Logs are decoded, capped, and kept on a timeout too.

    `exit_code` is the program's own, or minus the signal's number, or None on a timeout.
    """

    ending: Ending
    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool
    duration_s: float


class Process(Protocol):
    """A program that is running, with raw byte streams both ways; its standard error is kept as a log."""

    @property
    def stdin(self) -> BinaryIO:
        """Write to the program. Closing it sends the end of the stream."""
        ...

    @property
    def stdout(self) -> BinaryIO:
        """Read from the program. Reading blocks until bytes come or the program ends."""
        ...

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end; on a timeout the program and all that it started are killed."""
        ...

    def kill(self) -> None:
        """Kill the program and all that it started."""
        ...


class Sandbox(Protocol):
    """A place with a private writable folder, `root`, no network and no way back.

    A context manager: on leaving, all processes, files and mounts of it are gone, whatever happened.

    Raises:
        SandboxError: From any method, where the sandbox itself failed. What the program inside did is never
            raised: it is in `Finished`.
    """

    @property
    def kind(self) -> str:
        """`docker` or `local`."""
        ...

    @property
    def isolated(self) -> bool:
        """Whether code inside can reach nothing outside."""
        ...

    @property
    def root(self) -> PurePosixPath:
        """The private writable folder, as a path that programs inside see."""
        ...

    def put(self, files: Mapping[str, bytes], *, executable: Collection[str] = (), read_only: bool = False) -> None:
        """Write files at paths relative to `root`, making folders as needed.

        Those whose paths are in `executable` can be run. With `read_only` a program inside that runs under another user
        than the sandbox's own cannot change them.
        """
        ...

    def get(self, path: str, *, max_bytes: int, max_files: int = 10_000) -> dict[str, bytes]:
        """Read a file, or every regular file below a folder, at a path relative to `root`.

        Links and special files are left out. Returns {} where nothing is there.

        Raises:
            SandboxError: More bytes or files than the caps allow.
        """
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = ".",
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Finished:
        """Run a program to its end. `cwd` is relative to `root`. No shell."""
        ...

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a program and talk to it."""
        ...

    def close(self) -> None:
        """Remove everything. Harmless when repeated."""
        ...

    def __enter__(self) -> Self:
        """Enter."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        ...
