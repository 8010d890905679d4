"""A sandbox that does not isolate: a process group with limits, a scrubbed environment and a private folder.

It keeps honest mistakes from doing harm: endless output, endless loops, memory, processes that stay behind. It does
not keep a hostile program from reading what the person who runs it can read; the record says `isolated: false`.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import BinaryIO, Self
from uuid import uuid4

import psutil

from grader.errors import SandboxError
from grader.sandbox.archive import file_mode
from grader.sandbox.base import Ending, Finished, Limits, Specification
from grader.sandbox.logs import Log, pump

_MARK = "GRADER_SANDBOX"
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class LocalProcess:
    """A program in its own session."""

    def __init__(self, popen: "subprocess.Popen[bytes]", mark: str, limits: Limits) -> None:
        assert popen.stdin is not None
        assert popen.stdout is not None
        assert popen.stderr is not None
        self._popen, self._mark = popen, mark
        self._stdin, self._stdout = popen.stdin, popen.stdout
        self._began = time.monotonic()
        self._log = Log(limits.log_bytes)
        self._pump = pump(popen.stderr, self._log)  # type: ignore[arg-type]  # typeshed says IO[bytes]

    @property
    def stdin(self) -> BinaryIO:
        """The program's standard input."""
        return self._stdin  # type: ignore[return-value]  # typeshed says IO[bytes]

    @property
    def stdout(self) -> BinaryIO:
        """The program's standard output."""
        return self._stdout  # type: ignore[return-value]  # typeshed says IO[bytes]

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end, or kill at the timeout."""
        timed_out = False
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        self.kill()
        self._pump.join(timeout=5)
        code = self._popen.returncode
        return Finished(
            ending=Ending.TIMEOUT if timed_out else Ending.KILLED if code < 0 else Ending.EXITED,
            exit_code=None if timed_out else code,
            stdout="",
            stderr=self._log.text(),
            truncated=self._log.truncated,
            duration_s=time.monotonic() - self._began,
        )

    def kill(self) -> None:
        """End the group, and whatever left it but still carries the sandbox's mark."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._popen.wait()
        end_marked(self._mark)


class LocalSandbox:
    """The local kind. See `base.Sandbox`."""

    kind = "local"
    isolated = False

    def __init__(self, specification: Specification) -> None:
        self._limits = specification.limits
        self._mark = uuid4().hex
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="grader-"))
        except OSError as error:
            raise SandboxError(f"no temporary folder can be made: {error}", "free some disk space") from error
        (self._folder / "tmp").mkdir()
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        own = {"HOME": str(self._folder), "TMPDIR": str(self._folder / "tmp"), _MARK: self._mark}
        self._environment = {**kept, **specification.environment, **own}

    @property
    def root(self) -> PurePosixPath:
        """The private folder."""
        return PurePosixPath(self._folder)

    def put(self, files: Mapping[str, bytes], *, executable: Collection[str] = (), read_only: bool = False) -> None:
        """Write files below the root."""
        for name, content in files.items():
            path = self._inside(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            path.chmod(file_mode(name, executable, read_only))

    def get(self, path: str, *, max_bytes: int, max_files: int = 10_000) -> dict[str, bytes]:
        """Read a file or a folder."""
        if (self._folder / path).is_symlink():
            return {}
        place = self._inside(path)
        if not place.exists():
            return {}
        found = [place] if place.is_file() else sorted(p for p in place.rglob("*") if _is_plain_file(p, place))
        sizes = sum(each.lstat().st_size for each in found)
        if len(found) > max_files or sizes > max_bytes:
            raise SandboxError(
                f"{path} holds {len(found)} files of {sizes} bytes, the caps are {max_files} and {max_bytes}"
            )
        return {each.relative_to(self._folder).as_posix(): each.read_bytes() for each in found}

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = ".",
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Finished:
        """Run a program to its end."""
        process = self._spawn(argv, cwd, environment)
        log = Log(self._limits.log_bytes)
        reader = pump(process.stdout, log)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(stdin)
            process.stdin.close()
        finished = process.wait(timeout_s)
        reader.join(timeout=5)
        return Finished(
            ending=finished.ending,
            exit_code=finished.exit_code,
            stdout=log.text(),
            stderr=finished.stderr,
            truncated=finished.truncated or log.truncated,
            duration_s=finished.duration_s,
        )

    def start(
        self, argv: Sequence[str], *, cwd: str = ".", environment: Mapping[str, str] | None = None
    ) -> LocalProcess:
        """Start a program."""
        return self._spawn(argv, cwd, environment)

    def close(self) -> None:
        """End everything and remove the folder."""
        end_marked(self._mark)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        """Enter."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _spawn(self, argv: Sequence[str], cwd: str, environment: Mapping[str, str] | None) -> LocalProcess:
        limits = self._limits
        try:
            popen = subprocess.Popen(
                list(argv),
                cwd=self._inside(cwd),
                env={**self._environment, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
                preexec_fn=lambda: _limit(limits),  # noqa: PLW1509 - it makes system calls and takes no lock
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(
                f"{argv[0]!r} cannot be started: {error}", "install it; `grader doctor` helps"
            ) from error
        return LocalProcess(popen, self._mark, limits)

    def _inside(self, name: str) -> Path:
        path = self._folder / name
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise SandboxError(f"path {name!r} leads out of the sandbox")
        return path


def _is_plain_file(path: Path, top: Path) -> bool:
    parents = path.relative_to(top).parents
    return path.is_file() and not path.is_symlink() and not any((top / each).is_symlink() for each in parents)


def _limit(limits: Limits) -> None:
    """Runs in the child. The address space is not limited: torch reserves far more than it uses; data is."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits.open_files, limits.open_files))
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))


def end_marked(mark: str) -> None:
    """Kill every process that carries a sandbox's mark in its environment, until none is left."""
    for _ in range(20):
        marked = [process for process in psutil.process_iter() if _carries(process, mark)]
        if not marked:
            return
        for process in marked:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(marked, timeout=0.5)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except (psutil.Error, OSError):
        return False
