"""A student's C++ framework as a test of the judge sees it: probes and official cases, run one by one."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from grader.judge.context import BuildError
from grader.tracks.agent import AgentClient, ProgramLimits, SubmissionFailure
from grader.tracks.cpp.gtest import run_case
from grader.tracks.cpp.probe import program, run_probe

_SHOWN_BUILD_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Build:
    """What became of a build."""

    binaries: frozenset[str]
    errors: tuple[BuildError, ...]

    def require(self, target: str) -> None:
        """Return where `target` was built.

        Raises:
            SubmissionFailure: It was not; with the compiler's first errors in the student's own paths.
        """
        if target in self.binaries:
            return
        errors = [error for error in self.errors if error.target == target] or list(self.errors)
        shown = [error.model_dump(exclude={"target"}) for error in errors[:_SHOWN_BUILD_ERRORS]]
        where = f"{errors[0].path}:{errors[0].line}: {errors[0].message}" if errors else "the build's log has no error"
        raise SubmissionFailure("build_error", f"{target} was not built: {where}", {"errors": shown})


@dataclass(frozen=True, slots=True)
class CppSubmission:
    """A student's framework, called through probes that are linked against it."""

    client: AgentClient
    build: Build
    timeout_s: float
    limits: ProgramLimits

    def probe(
        self,
        name: str,
        inputs: Mapping[str, Tensor | bytes],
        arguments: Mapping[str, str | int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Tensor]:
        """Run the probe `name`: tensors and files in, tensors out.

        Raises:
            SubmissionFailure: It was not built, crashed, or left no outputs.
            InfrastructureError: The sandbox failed.
        """
        self.build.require(program(name))
        limit = timeout_s or self.timeout_s
        return run_probe(self.client, name, inputs, arguments or {}, timeout_s=limit, limits=self.limits)

    def official(self, target: str, case: str) -> None:
        """Run one official case.

        Raises:
            SubmissionFailure: It was not built, or did not pass.
            InfrastructureError: The sandbox failed.
        """
        self.build.require(target)
        run_case(self.client, target, case, timeout_s=self.timeout_s, limits=self.limits)
