"""A container without network, capabilities, or anything writable but a sized folder in memory.

Its first process is a small guard on a stream that only we hold: when told to, it ends every other process of the
container, and says how many programs the kernel killed for memory. Programs run through the engine's exec.
"""

import contextlib
import io
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, Self

import docker
import docker.errors
import docker.types
import requests
from docker.utils.socket import frames_iter

from grader.errors import SandboxError
from grader.sandbox import owner
from grader.sandbox.archive import pack, unpack
from grader.sandbox.base import Ending, Finished, Specification
from grader.sandbox.logs import Log
from grader.sandbox.sockets import Capped, SocketWriter, feed, raw, write_all

ROOT = PurePosixPath("/work")
USER = 10000
_ENGINE_TIMEOUT_S = 60
_STDOUT, _STDERR = 1, 2
_ENGINE_ERRORS = (docker.errors.DockerException, requests.RequestException, OSError)
# `kill -1` spares the shell that calls it and the container's first process, so both live on.
_GUARD = r"""
oom() {
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r "$file" ] && while read -r name count; do [ "$name" = oom_kill ] && echo "$count" && return; done < "$file"
  done
  echo 0
}
echo ready
while read -r request; do
  if [ "$request" = end ]; then
    tries=0
    while kill -KILL -1 2>/dev/null && [ "$tries" -lt 50 ]; do tries=$((tries + 1)); done
  fi
  oom
done
"""


class DockerProcess:
    """A program that was started by the engine's exec, with its streams demultiplexed."""

    def __init__(self, sandbox: "DockerSandbox", exec_id: str, connection: socket.socket) -> None:
        self._sandbox, self._exec_id, self._socket = sandbox, exec_id, connection
        self._began = time.monotonic()
        self._log = Log(sandbox.limits.log_bytes)
        self._oom_before = sandbox.oom_kills()
        reader, writer = os.pipe()
        self._stdout: BinaryIO = os.fdopen(reader, "rb", buffering=0)
        self._stdin: BinaryIO = io.BufferedWriter(SocketWriter(connection), 1 << 16)
        self._pump = threading.Thread(target=self._demultiplex, args=(writer,), daemon=True)
        self._pump.start()

    @property
    def stdin(self) -> BinaryIO:
        """The program's standard input."""
        return self._stdin

    @property
    def stdout(self) -> BinaryIO:
        """The program's standard output."""
        return self._stdout

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end, or end everything in the container at the timeout."""
        self._pump.join(timeout_s)
        timed_out = self._pump.is_alive()
        if timed_out:
            self.kill()
        code = None if timed_out else self._exit_code()
        out_of_memory = self._sandbox.oom_kills() > self._oom_before
        return Finished(
            ending=_ending(timed_out, code, out_of_memory),
            exit_code=128 - code if code is not None and 128 < code <= 192 else code,
            stdout="",
            stderr=self._log.text(),
            truncated=self._log.truncated,
            duration_s=time.monotonic() - self._began,
        )

    def kill(self) -> None:
        """End every program in the container."""
        self._sandbox.end_programs()
        self._pump.join(timeout=5)
        with contextlib.suppress(OSError):
            self._socket.close()

    def _demultiplex(self, writer: int) -> None:
        """Carry standard output to a pipe, whose reader slows the program down, and standard error to the log."""
        try:
            for stream, data in frames_iter(self._socket, tty=False):
                if stream == _STDERR:
                    self._log.feed(data)
                elif stream == _STDOUT:
                    write_all(writer, data)
        except OSError:  # the reader closed its end, or the connection was closed by `kill`
            pass
        finally:
            os.close(writer)

    def _exit_code(self) -> int:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            state = self._sandbox.inspect_exec(self._exec_id)
            if not state["Running"]:
                return int(state["ExitCode"])
            time.sleep(0.01)
        raise SandboxError("the engine says that a program runs whose streams have ended", "retry")


class DockerSandbox:
    """The Docker kind. See `base.Sandbox`."""

    kind = "docker"
    isolated = True
    root = ROOT

    def __init__(self, specification: Specification) -> None:
        self.limits = specification.limits
        self._environment = {"HOME": str(ROOT), "TMPDIR": "/tmp", "LANG": "C.UTF-8", **specification.environment}  # noqa: S108
        self._user = "0:0" if specification.needs_user_switch else f"{USER}:{USER}"
        self._container = ""
        self._lock = threading.Lock()
        try:
            self._api = docker.APIClient(version="auto", timeout=_ENGINE_TIMEOUT_S)
            self._container = self._create(specification)
            self._guard = raw(self._api.attach_socket(self._container, params=_ATTACH))
            self._guard_frames = frames_iter(self._guard, tty=False)
            self._api.start(self._container)
            self._answer()
        except _ENGINE_ERRORS as error:
            self.close()
            raise _engine_failure(error, specification.image) from error

    def put(self, files: Mapping[str, bytes], *, executable: Collection[str] = (), read_only: bool = False) -> None:
        """Write files below the root, as one archive through a program's standard input."""
        archive = pack(files, executable=executable, read_only=read_only)
        owner_flag = "--no-same-owner"
        argv = ["tar", "-x", "-p", owner_flag, "--overwrite", "-C", str(ROOT), "-f", "-"]
        finished = self._run(argv, stdin=archive, timeout_s=120)[0]
        if finished.exit_code != 0:
            raise SandboxError(f"files cannot be put into the sandbox: {finished.stderr.strip()[-500:]}")

    def get(self, path: str, *, max_bytes: int, max_files: int = 10_000) -> dict[str, bytes]:
        """Read files as one archive, at most a little over the cap of it."""
        inside = PurePosixPath(path)
        if inside.is_absolute() or ".." in inside.parts:
            raise SandboxError(f"path {path!r} leads out of the sandbox")
        cap = max_bytes + (max_files + 20) * 1536
        argv = ["tar", "-c", "-C", str(ROOT), "-f", "-", "--", str(inside)]
        finished, archive = self._run(argv, timeout_s=120, max_stdout=cap)
        if len(archive) > cap:
            raise SandboxError(f"{path} holds more than the cap of {max_bytes} bytes")
        if finished.exit_code not in {0, 1}:  # 2: nothing is there; 1: a file changed while it was read
            return {}
        return unpack(archive, max_bytes, max_files)

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
        finished, stdout = self._run(
            argv, timeout_s=timeout_s, cwd=cwd, environment=environment, stdin=stdin, log_stdout=True
        )
        log = Log(self.limits.log_bytes)
        log.feed(stdout)
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
    ) -> DockerProcess:
        """Start a program."""
        try:
            exec_id = self._api.exec_create(
                self._container,
                list(argv),
                stdin=True,
                environment={**self._environment, **(environment or {})},
                workdir=str(ROOT / cwd),
                user=self._user,
            )["Id"]
            connection = raw(self._api.exec_start(exec_id, socket=True))
        except _ENGINE_ERRORS as error:
            raise _engine_failure(error, "") from error
        return DockerProcess(self, exec_id, connection)

    def end_programs(self) -> None:
        """End every program in the container."""
        self._ask("end")

    def oom_kills(self) -> int:
        """Return how many programs the kernel has killed in this container for want of memory."""
        return self._ask("count")

    def inspect_exec(self, exec_id: str) -> dict[str, Any]:
        """Return the engine's word on a program."""
        try:
            state: dict[str, Any] = self._api.exec_inspect(exec_id)
        except _ENGINE_ERRORS as error:
            raise _engine_failure(error, "") from error
        return state

    def close(self) -> None:
        """Remove the container."""
        if not self._container:
            return
        with contextlib.suppress(*_ENGINE_ERRORS):
            self._api.remove_container(self._container, force=True, v=True)
        self._container = ""
        self._api.close()

    def __enter__(self) -> Self:
        """Enter."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _create(self, specification: Specification) -> str:
        created = self._api.create_container(
            specification.image,
            entrypoint=["sh", "-c", _GUARD],
            command=[],
            user="0:0",
            stdin_open=True,
            labels=owner.labels(specification.label),
            working_dir=str(ROOT),
            environment={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            host_config=self._api.create_host_config(**host_options(specification)),
        )
        return str(created["Id"])

    def _ask(self, request: str) -> int:
        with self._lock:
            try:
                self._guard.sendall(f"{request}\n".encode())
                return int(self._answer())
            except (*_ENGINE_ERRORS, ValueError) as error:
                raise SandboxError(f"the container's guard does not answer: {error}", "retry") from error

    def _answer(self) -> str:
        text = b""
        for _, data in self._guard_frames:
            text += data
            if text.endswith(b"\n"):
                return str(text.decode().strip())
        raise SandboxError("the container ended by itself", "see the engine's log; retry")

    def _run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = ".",
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_stdout: int = 0,
        log_stdout: bool = False,
    ) -> tuple[Finished, bytes]:
        """Run a program, keeping at most one byte more of its output than the cap."""
        process = self.start(argv, cwd=cwd, environment=environment)
        cap = self.limits.log_bytes if log_stdout else max_stdout
        kept = Capped(cap + 1)
        reader = threading.Thread(target=kept.read_from, args=(process.stdout,), daemon=True)
        reader.start()
        writer = threading.Thread(target=feed, args=(process.stdin, stdin), daemon=True)
        writer.start()
        finished = process.wait(timeout_s)
        reader.join(timeout=5)
        if finished.ending is Ending.TIMEOUT or log_stdout:
            self.end_programs()
        return finished, kept.data


_ATTACH = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}


def host_options(specification: Specification) -> dict[str, Any]:
    """Return what the engine is asked to hold a container to."""
    limits = specification.limits
    user = 0 if specification.needs_user_switch else USER
    devices = (
        [docker.types.DeviceRequest(count=specification.gpus, capabilities=[["gpu"]])] if specification.gpus else []
    )
    return {
        "network_mode": "none",
        "read_only": True,
        "init": True,
        "cap_drop": ["ALL"],
        # The guard ends other users' programs; an agent changes users. Programs under USER have none of these.
        "cap_add": ["KILL", "SETUID", "SETGID"] if specification.needs_user_switch else ["KILL"],
        "security_opt": ["no-new-privileges"],
        "tmpfs": {
            str(ROOT): f"exec,size={limits.scratch_bytes},mode=755,uid={user},gid={user},nr_inodes=200000",
            "/tmp": f"exec,size={limits.scratch_bytes // 4},mode=1777,nr_inodes=50000",  # noqa: S108
        },
        "shm_size": limits.shared_memory_bytes,
        "pids_limit": limits.processes,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        # The engine refuses to promise more than there are.
        "nano_cpus": int(min(limits.cpus, os.cpu_count() or 1) * 1e9),
        "ulimits": [
            docker.types.Ulimit(name="core", soft=0, hard=0),
            docker.types.Ulimit(name="fsize", soft=limits.file_bytes, hard=limits.file_bytes),
            docker.types.Ulimit(name="nofile", soft=limits.open_files, hard=limits.open_files),
        ],
        "log_config": docker.types.LogConfig(type="none"),
        "device_requests": devices,
    }


def _ending(timed_out: bool, code: int | None, out_of_memory: bool) -> Ending:
    if out_of_memory:
        return Ending.OUT_OF_MEMORY
    if timed_out or code is None:
        return Ending.TIMEOUT
    return Ending.KILLED if 128 < code <= 192 else Ending.EXITED


def _engine_failure(error: Exception, image: str) -> SandboxError:
    if isinstance(error, docker.errors.ImageNotFound):
        return SandboxError(f"the engine has no image {image!r}", "build it: grader images build")
    text = " ".join(str(error).split())
    return SandboxError(f"the Docker engine failed: {text}", "see that it runs: grader doctor")
