"""A student's C++ framework as a test of the judge sees it: probes and official cases, run one by one."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from grader.errors import InfrastructureError
from grader.judge.context import BuildError, Context
from grader.tracks.agent import AgentClient, ProgramLimits, SubmissionFailure
from grader.tracks.cpp.gtest import run_case
from grader.tracks.cpp.probe import program, run_probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What became of a build: targets that were built, those that were not, and why. See `Context`."""

    built: frozenset[str]
    failed: frozenset[str] = frozenset()
    errors: tuple[BuildError, ...] = ()
    ending: str = "finished"

    @classmethod
    def of(cls, context: Context, built: Collection[str]) -> Self:
        """Return the build that a context tells of."""
        failed = frozenset(context.failed_targets)
        return cls(built=frozenset(built), failed=failed, errors=context.build_errors, ending=context.build_ending)

    def require(self, target: str) -> None:
        """Return where `target` was built.

        Raises:
            SubmissionFailure: It was not; with the compiler's first error in the student's own paths. All errors stand
                in the record once, and not again with every check that they keep from running.
            InfrastructureError: Nobody asked for it to be built.
        """
        if target in self.built:
            return
        if target not in self.failed:
            raise InfrastructureError(f"{target!r} is neither built nor known to have failed", "grade again")
        if self.ending != "finished":
            raise SubmissionFailure(self.ending, f"the build ended ({self.ending}) before {target} was built")
        first = next((error for error in self.errors if error.target == target), None) or next(iter(self.errors), None)
        raise SubmissionFailure("build_error", f"{target} was not built: {_place(first)}", {"target": target})


def _place(error: BuildError | None) -> str:
    if error is None:
        return "see the build's log"
    position = ":".join(str(part) for part in (error.path, error.line) if part)
    return ": ".join(part for part in (position, error.message.split("\n", 1)[0]) if part)


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
