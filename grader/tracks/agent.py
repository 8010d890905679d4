"""The host's side of the agent: runs programs and ranks in one sandbox, and believes nothing that comes back."""

import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import grader
from grader import wire
from grader.errors import InfrastructureError, WireError
from grader.sandbox import open_sandbox
from grader.sandbox.base import Process, Sandbox, Specification
from grader.tracks.messages import (
    Command,
    CommandFinished,
    ProgramLimits,
    RankCase,
    RankReport,
    RanksFinished,
    SubmissionFailure,
)

__all__ = [
    "AgentClient",
    "Command",
    "CommandFinished",
    "ProgramLimits",
    "RankCase",
    "RankReport",
    "RanksFinished",
    "SubmissionFailure",
]

_PACKAGE = Path(grader.__file__).parent
_SHIPPED = ("__init__.py", "errors.py", "wire.py")
_READY_S = 60.0
_WARM_S = 180.0
_MAX_REASON = 4000
_MARGIN_S = 60.0  # beyond a case's own limit, for the agent to clean up on a busy machine
# A user id counts against RLIMIT_NPROC in every container of a machine, so that each sandbox draws its own range.
_FIRST_USER, _USERS_PER_SANDBOX, _RANGES = 1_000_000, 256, 100_000


class AgentClient:
    """A sandbox with an agent in it. A context manager; on leaving, the sandbox is gone.

    Raises:
        InfrastructureError: From any method, where the agent or the sandbox failed.
    """

    def __init__(self, sandbox: Sandbox, process: Process) -> None:
        self.sandbox = sandbox
        self._process = process
        self._ids = itertools.count(1)
        self._warming = False
        self._lock = threading.Lock()
        self.python = ""
        self.torch = ""

    @classmethod
    def open(
        cls,
        kind: Literal["docker", "local"],
        specification: Specification,
        files: Mapping[str, bytes],
        python: str = "python3",
        *,
        needs_torch: bool = False,
    ) -> Self:
        """Make a sandbox, put `files` and the agent into it, and start the agent.

        Args:
            kind: Which kind of sandbox.
            specification: What it may use.
            files: The student's below `submission/`, and the given ones; programs are marked executable.
            python: The interpreter, as the sandbox sees it.
            needs_torch: Let the agent begin to import torch at once, while the host goes on.
        """
        specification = replace(specification, needs_user_switch=kind == "docker")
        sandbox = open_sandbox(kind, specification)
        try:
            return cls.start(sandbox, files, python, own_users=kind == "docker", needs_torch=needs_torch)
        except BaseException:
            sandbox.close()
            raise

    @classmethod
    def start(
        cls,
        sandbox: Sandbox,
        files: Mapping[str, bytes],
        python: str = "python3",
        *,
        own_users: bool,
        needs_torch: bool = False,
    ) -> Self:
        """Start the agent in a sandbox that is there. The client then owns the sandbox."""
        sandbox.put({**files, **_agent_files()}, executable=files, read_only=True)
        argv = [python, "-P", "-s", "-B", "-m", "grader.agent.main"]
        if own_users:
            first = _FIRST_USER + _USERS_PER_SANDBOX * secrets.randbelow(_RANGES)
            argv += ["--users", str(first)]
        environment = {"PYTHONPATH": str(sandbox.root / "agent"), "GLOO_SOCKET_IFNAME": "lo"}
        client = cls(sandbox, sandbox.start(argv, environment=environment))
        with client._watched(_READY_S):
            client.python = str(client._receive("ready").header["python"])
            if needs_torch:
                client._begin_to_warm()
        return client

    def warm(self) -> None:
        """Wait until torch is imported in the agent; from then on a case costs what it computes."""
        with self._lock:
            if not self.torch:
                with self._watched(_WARM_S):
                    self._begin_to_warm()
                    self.torch = str(self._receive("warmed").header["torch"])

    def run_command(self, command: Command) -> CommandFinished:
        """Run a program to its end.

        Raises:
            InfrastructureError: It could not be started, or the agent failed.
        """
        self._settle()
        with self._lock, self._watched(command.timeout_s + _MARGIN_S):
            self._send({**command.header(), "id": next(self._ids)}, b"".join(command.inputs.values()))
            answer = self._receive("command_finished", "not_started")
        if answer.header["kind"] == "not_started":
            raise InfrastructureError(str(answer.header.get("what"))[:_MAX_REASON], "check the image and the build")
        return CommandFinished.parse(answer)

    def run_ranks(self, case: RankCase, inputs: Sequence[bytes]) -> RanksFinished:
        """Run one case.

        Args:
            case: What to run.
            inputs: One safetensors payload a rank: its own shards and nobody else's.

        Raises:
            InfrastructureError: The ranks could not be started, or the agent failed.
        """
        assert len(inputs) == case.world_size
        self.warm()
        with self._lock, self._watched(case.timeout_s + _MARGIN_S):
            self._send({**case.header(), "id": next(self._ids)})
            for rank, payload in enumerate(inputs):
                self._send({"kind": "rank_inputs", "rank": rank}, payload)
            answer = self._receive("ranks_finished")
        return RanksFinished.parse(answer)

    def close(self) -> None:
        """Remove the sandbox and everything in it. Harmless when repeated."""
        self.sandbox.close()

    def __enter__(self) -> Self:
        """Enter."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _settle(self) -> None:
        if self._warming:
            self.warm()

    def _begin_to_warm(self) -> None:
        if not self._warming:
            self._warming = True
            self._send({"kind": "warm"})

    @contextlib.contextmanager
    def _watched(self, seconds: float) -> Iterator[None]:
        """An agent that says nothing for so long is killed, which ends the read that waits for it."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, WireError, KeyError, ValueError) as error:
            raise self._dead(str(error)) from error
        finally:
            timer.cancel()

    def _send(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        self._process.stdin.write(wire.encode_header(header, len(payload)))
        self._process.stdin.write(payload)
        self._process.stdin.flush()

    def _receive(self, *kinds: str) -> wire.Frame:
        frame = wire.read(self._process.stdout)
        if frame is None:
            raise WireError("it ended")
        if frame.header.get("kind") == "failed":
            raise WireError(str(frame.header.get("what"))[:_MAX_REASON])
        if frame.header.get("kind") not in kinds:
            raise WireError(f"it answered {str(frame.header.get('kind'))[:100]!r}, expected {kinds[0]!r}")
        return frame

    def _dead(self, reason: str) -> InfrastructureError:
        self._process.kill()
        log = self._process.wait(10).stderr[-2000:]
        return InfrastructureError(
            f"the agent in the {self.sandbox.kind} sandbox failed: {reason}" + (f"\n{log}" if log else ""),
            "grade again; where it happens again, run `grader doctor` and keep the log",
        )


def _agent_files() -> dict[str, bytes]:
    files = [_PACKAGE / name for name in _SHIPPED] + sorted((_PACKAGE / "agent").glob("*.py"))
    return {f"agent/grader/{file.relative_to(_PACKAGE)}": file.read_bytes() for file in files}
