"""Runs one program in a private folder, as its own user where that is possible, and reads its outputs back."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from grader.agent import process, streams
from grader.agent.folders import Case
from grader.agent.host import Host
from grader.agent.privileges import Limits, become
from grader.agent.process import Child, Setting
from grader.errors import SandboxError

_CASE = "{case}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A `run_command` request; `{case}` in `argv`, `cwd` and `environment` stands for the private folder."""

    id: int
    argv: Sequence[str]
    timeout_s: float
    cwd: str
    environment: Mapping[str, str]
    limits: Limits
    inputs: Sequence[tuple[str, int]]
    outputs: Sequence[str]
    max_output_bytes: int

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> "Command":
        """Read the request.

        Raises:
            SandboxError: A file's name is a path.
        """
        inputs = [(_plain(name), int(size)) for name, size in header["inputs"]]
        return cls(
            id=int(header["id"]),
            argv=[str(part) for part in header["argv"]],
            timeout_s=float(header["timeout_s"]),
            cwd=str(header["cwd"]),
            environment=dict(header["environment"]),
            limits=Limits.from_header(header["limits"]),
            inputs=inputs,
            outputs=[_plain(name) for name in header["outputs"]],
            max_output_bytes=int(header["max_output_bytes"]),
        )


def run(request: Command, *, root: str, user: int | None, host: Host) -> None:
    """Run the program, and send `command_finished` with what it left, or `not_started`.

    Args:
        request: What to run.
        root: The folder for private folders.
        user: The user to run as, or None.
        host: Where the inputs' bytes stand next, and where the answer goes.

    Raises:
        SandboxError: The program could not be prepared, or its remains could not be ended.
        EOFError: The host is gone.
    """
    with Case(root) as case:
        folder = case.folder("own", user)
        setting = Setting(folder=folder, user=user, limits=request.limits)
        with process.ended([process.spawn(setting, lambda: _become_program(request, folder))]) as children:
            ending, child = _watch(request, case, children, host.source), children[0]
            process.end(children)
            if child.setup_log.total:
                what = f"{request.argv[0]!r} could not be started: {child.setup_log.text().strip()}"
                host.answer({"kind": "not_started", "id": request.id, "what": what})
                return
            with contextlib.closing(streams.Store(request.max_output_bytes)) as store:
                found, refused = _collect(request, folder, user, store)
                logs = [child.stdout.kept(), child.stderr.kept()]
                report = _report(ending, child) | {"log_sizes": [len(log) for log in logs]}
                header = {**report, "id": request.id, "outputs": found, "refused": refused}
                host.answer(header, store.size + sum(report["log_sizes"]))
                store.send_to(host.target)
                streams.write_all(host.target, b"".join(logs))


def _watch(request: Command, case: Case, children: list[Child], source: int) -> str:
    process.wait_ready(children)
    case.seal()
    streams.forward(source, children[0].input, sum(size for _, size in request.inputs))
    children[0].started_at = time.monotonic()
    children[0].let_go()
    return process.Watch(children, source).run(children[0].started_at + request.timeout_s)


def _become_program(request: Command, folder: str) -> NoReturn:
    with open(process.INPUT, "rb", buffering=0) as pipe:
        for name, size in request.inputs:
            _copy(pipe.fileno(), name, size)
        pipe.read()
    environment = {name: value.replace(_CASE, folder) for name, value in request.environment.items()}
    environment |= {"HOME": folder, "TMPDIR": folder}
    os.chdir(request.cwd.replace(_CASE, folder))
    os.umask(0o022)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    argv = [part.replace(_CASE, folder) for part in request.argv]
    try:
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - no shell is the point
    except OSError as error:
        os.write(process.SETUP, str(error).encode())
        os._exit(127)


def _copy(source: int, name: str, size: int) -> None:
    with open(name, "xb", buffering=0) as file:
        while size:
            data = os.read(source, min(size, streams.CHUNK_BYTES))
            if not data:
                raise EOFError(f"the input {name} ended {size} bytes early")
            size -= len(data)
            streams.write_all(file.fileno(), data)


def _collect(
    request: Command, folder: str, user: int | None, store: streams.Store
) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
    """Read the outputs as the program's own user, who alone may enter the folder."""
    if not request.outputs:
        return [], []
    reading, writing = streams.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become(user)
            streams.write_all(writing, json.dumps(_read_outputs(request, folder, store)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    if not text:
        raise SandboxError("the outputs of a program could not be read back")
    found, refused = json.loads(text)
    store.size = sum(size for _, size in found)
    return found, refused


def _read_outputs(
    request: Command, folder: str, store: streams.Store
) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
    found: list[tuple[str, int]] = []
    refused: list[tuple[str, str]] = []
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:  # where it has no user of its own, the program can replace its folder
        return [], [(name, str(error)) for name in request.outputs]
    left = request.max_output_bytes
    for name in request.outputs:
        try:
            size = _read_output(directory, name, left, store.descriptor)
        except FileNotFoundError:
            continue
        except OSError as error:
            refused.append((name, str(error)))
            continue
        found.append((name, size))
        left -= size
    return found, refused


def _read_output(directory: int, name: str, left: int, target: int) -> int:
    file = process.open_regular(directory, name)
    try:
        size = os.fstat(file).st_size
        if size > left:
            raise OSError(f"{name} has {size} bytes, {left} were left of what it may have")
        moved = 0
        while moved < size and (count := os.sendfile(target, file, None, size - moved)):
            moved += count
        return moved
    finally:
        os.close(file)


def _report(ending: str, child: Child) -> dict[str, Any]:
    return {
        "kind": "command_finished",
        "ending": ending_of(ending, child),
        "exit_code": None if ending == "timeout" else child.exit_code,
        "duration_s": child.ended_at - child.started_at,
        "truncated": child.stdout.truncated or child.stderr.truncated,
        "peak_bytes": child.peak_bytes,
        "out_of_memory": child.out_of_memory or _could_not_allocate(child),
    }


def _could_not_allocate(child: Child) -> bool:
    # What the C++ runtime prints before it aborts a program that is over its own limit.
    return child.exit_code == -signal.SIGABRT and "instance of 'std::bad_alloc'" in child.stderr.text()


def ending_of(watched: str, child: Child) -> str:
    """Say how a child ended: `exited`, `killed` by a signal, or `timeout`."""
    if watched == "timeout":
        return "timeout"
    code = child.exit_code
    return "exited" if code is not None and code >= 0 else "killed"


def _plain(name: object) -> str:
    if not isinstance(name, str) or not name or "/" in name or name in {".", ".."} or "\0" in name:
        raise SandboxError(f"the file name {name!r} is not a plain name")
    return name
