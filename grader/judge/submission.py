"""What a test of the judge calls the submission: the student's code, in this worker's own sandbox."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from grader.assignment.manifest import Manifest
from grader.errors import InfrastructureError
from grader.judge.context import Context
from grader.judge.programs import Build, CppSubmission
from grader.sandbox.base import MEBIBYTE, Limits, Specification
from grader.tracks.agent import AgentClient, ProgramLimits
from grader.tracks.torch.session import RankResult, Session


@dataclass(frozen=True, slots=True)
class TorchSubmission:
    """A student's package `parallel`, called through the assignment's harness."""

    session: Session
    timeout_s: float

    def run(
        self,
        function: str,
        inputs: Sequence[Mapping[str, Tensor]],
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[RankResult, ...]:
        """Call `function` of `harness.py` on every rank; `inputs` has one mapping a rank, with its own shards only.

        Raises:
            SubmissionFailure: The student's code crashed, hung, ran out of memory, or handed back what cannot be read.
            InfrastructureError: The sandbox failed.
        """
        return self.session.run(function, dict(arguments or {}), inputs, timeout_s or self.timeout_s)


@dataclass(slots=True)
class Submissions:
    """This worker's sandbox: opened when first used, and anew after it failed. A context manager."""

    context: Context
    manifest: Manifest
    _torch: Session | None = None
    _client: AgentClient | None = None
    _built: frozenset[str] = frozenset()
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @contextlib.contextmanager
    def use(self) -> Iterator[TorchSubmission | CppSubmission]:
        """Lend the submission. What breaks the sandbox ends it, so that the next check gets a fresh one."""
        try:
            yield self._cpp() if self.manifest.track == "cpp" else self._session()
        except InfrastructureError:
            self.close()
            raise

    def official(self, target: str, case: str) -> None:
        """Run one official case, as `CppSubmission.official`."""
        with self.use() as submission:
            assert isinstance(submission, CppSubmission)
            submission.official(target, case)

    def _session(self) -> TorchSubmission:
        timeout_s = self.manifest.limits.case_s
        if self._torch is None:
            self._torch = self._open.enter_context(
                Session.open(
                    self.context.kind,
                    self._specification(),
                    files_below(self.context.workspace_dir),
                    (self.context.assignment_dir / "harness.py").read_bytes(),
                    python=self._python(),
                    limits=self._program_limits(),
                )
            )
        return TorchSubmission(self._torch, timeout_s)

    def _cpp(self) -> CppSubmission:
        if self._client is None:
            folder = self.context.binaries_dir
            binaries = files_below(folder) if folder is not None else {}
            self._built = frozenset(binaries)
            files = {f"bin/{name}": data for name, data in binaries.items()}
            if self.context.data_dir is not None:
                files |= files_below(self.context.data_dir)
            opened = AgentClient.open(self.context.kind, self._specification(), files, python=self._python())
            self._client = self._open.enter_context(opened)
        return CppSubmission(
            self._client, Build.of(self.context, self._built), self.manifest.limits.case_s, self._program_limits()
        )

    def _specification(self) -> Specification:
        bounds = self.manifest.limits
        return Specification(
            image=self.context.image,
            gpus=self.context.gpus,
            limits=Limits(memory_bytes=bounds.memory_mib * MEBIBYTE, processes=bounds.processes),
            label=self.context.label,
        )

    def _program_limits(self) -> ProgramLimits:
        return ProgramLimits(memory_bytes=self.manifest.limits.memory_mib * MEBIBYTE)

    def _python(self) -> str:
        """The local sandbox runs our own interpreter, which has torch; an image has its own."""
        return sys.executable if self.context.kind == "local" else "python3"

    def close(self) -> None:
        """Remove the sandbox. Harmless when repeated."""
        self._torch = self._client = None
        self._open.close()

    def __enter__(self) -> Self:
        """Enter."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def files_below(folder: Path) -> dict[str, bytes]:
    """Return every regular file below `folder` by its relative path."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
