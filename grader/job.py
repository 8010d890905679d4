"""One assignment of one commit: build where there is something to build, judge, and write down what came of it."""

import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol

from ulid import ULID

from grader import images
from grader.assignment.manifest import ItemSpec, Manifest
from grader.judge import run as judge
from grader.judge import scoring
from grader.judge.context import BuildError, CheckResult, Context, Official
from grader.record import AssignmentRef, Flag, Phases, Record, Runner, Submission
from grader.settings import Settings
from grader.store import Grading, artifacts, digest_of
from grader.tracks.cpp.build import BuildResult, Plan, building
from grader.tracks.cpp.gtest import declared_cases

Language = Literal["en", "zh"]
RunnerKind = Literal["docker", "local"]


class Progress(Protocol):
    """Who is told how far a grading is."""

    def phase(self, name: str) -> None:
        """A phase begins: fetch, prepare, build, judge."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line happened."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for. `runner` is `docker` unless the person asked for `local` in so many words."""

    link: str
    assignment: str | None = None
    student: str | None = None
    runner: RunnerKind = "docker"
    gpus: int = 0
    language: Language = "en"
    fresh: bool = False


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent in each phase."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase, and say that it began."""
        self.progress.phase(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[f"{name}_s"] = self.seconds.get(f"{name}_s", 0.0) + time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Image:
    """The images that a grading uses, by what for; empty names for the local runner."""

    build: str = ""
    run: str = ""
    digest: str = ""

    @classmethod
    def of(cls, runner: RunnerKind, manifest: Manifest) -> "Image":
        """Return what a runner needs for an assignment.

        Raises:
            InfrastructureError: An image is not here, or the engine does not answer.
        """
        if runner == "local":
            return cls()
        names: tuple[images.Name, images.Name] = ("cpp", "cpp-run") if manifest.track == "cpp" else ("torch", "torch")
        build_tag, run_tag = (images.require(name) for name in names)
        return cls(build_tag, run_tag, digest_of([images.digest(build_tag), images.digest(run_tag)]))


@dataclass(frozen=True, slots=True)
class Job:
    """One assignment of one commit, ready to be built and judged."""

    request: Request
    settings: Settings
    manifest: Manifest
    image: Image
    files: Mapping[str, bytes]
    originals: Mapping[str, bytes] | None
    submission: Submission
    flags: tuple[Flag, ...]
    watch: Stopwatch
    public_only: bool = False

    def run(self) -> Grading:
        """Build where there is something to build, judge, and write down what came of it."""
        started = datetime.now(UTC)
        seed = secrets.randbits(62)
        folder = Path(tempfile.mkdtemp(prefix="grader-job-"))
        try:
            with ExitStack() as stack:
                waiting = stack.enter_context(
                    judge.started(self.settings.assignments / self.manifest.id, self._workers())
                )
                built = self._build(stack) if self.manifest.track == "cpp" else None
                context = self._context(folder, built, seed)
                with self.watch.phase("judge"):
                    results = waiting.run(context, self._say)
            logs = self._logs(context, built)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self._grading(started, seed, built, context, results, logs)

    def _build(self, stack: ExitStack) -> BuildResult:
        originals = self.originals or {}
        plan = Plan(
            files=self.files,
            originals=originals,
            tests=tuple(Path(item.official).stem for item in self._official_items() if item.official),
            probes=_probes(self.settings.assignments / self.manifest.id),
            timeout_s=self.manifest.limits.build_s,
            memory_bytes=self.manifest.limits.memory_mib << 20,
            cuda=self.request.gpus > 0,
            cache=self._compile_cache(),
            label=self.submission.commit[:12],
        )
        with self.watch.phase("build"):
            return stack.enter_context(building(self.request.runner, self.image.build, plan))

    def _official_items(self) -> tuple[ItemSpec, ...]:
        """Return the items whose official tests are at hand and can run here."""
        here = {"cuda"} if self.request.gpus else set()
        return tuple(
            item
            for item in self.manifest.items
            if item.official in (self.originals or {}) and {*item.needs, *item.official_needs} <= here
        )

    def _compile_cache(self) -> Path:
        """One for each student: nobody can leave a poisoned object for somebody else."""
        owner = digest_of(
            [f"student {self.submission.student}" if self.submission.student else self.submission.repository]
        )
        return self.settings.cache / "compile" / owner[:32]

    def _context(self, folder: Path, built: BuildResult | None, seed: int) -> Context:
        """Lay out on disk what the judge's process reads."""
        _write(folder / "workspace", self.files)
        if built is not None:
            _write(folder / "binaries", built.binaries)
        return Context(
            assignment_dir=self.settings.assignments / self.manifest.id,
            kind=self.request.runner,
            image=self.image.run,
            gpus=self.request.gpus,
            workspace_dir=folder / "workspace",
            binaries_dir=folder / "binaries" if built is not None else None,
            build_errors=_build_errors(built),
            build_ending=_build_ending(built),
            failed_targets=tuple(built.failed_targets) if built is not None else (),
            official=_official(self.manifest, self.originals),  # all: what cannot run here is said so
            devices=("cpu", "cuda") if self.request.gpus else ("cpu",),
            seed=seed,
            results_path=folder / "results.jsonl",
            language=self.request.language,
            public_only=self.public_only,
            label=self.submission.commit[:12],
        )

    def _workers(self) -> int:
        """Return how many judge side by side. C++ checks are far shorter than another worker's import of torch."""
        if self.manifest.track == "cpp":
            return 1
        checks = sum(len(item.checks) for item in self.manifest.items)
        return max(1, min(self.settings.judge_workers, os.cpu_count() or 1, checks // judge.CHECKS_PER_WORKER))

    def _say(self, result: CheckResult, done: int, planned: int) -> None:
        self.watch.progress.note(f"[{done}/{planned}] {result.check.status:<12} {result.item} {result.check.id}")

    def _logs(self, context: Context, built: BuildResult | None) -> dict[str, bytes]:
        logs = {"logs/build.log": built.log.encode()} if built is not None else {}
        judge_log = context.results_path.parent / "judge.log"
        if judge_log.is_file():
            logs["logs/judge.log"] = judge_log.read_bytes()
        return logs

    def _grading(
        self,
        started: datetime,
        seed: int,
        built: BuildResult | None,
        context: Context,
        results: list[CheckResult],
        logs: dict[str, bytes],
    ) -> Grading:
        scored = scoring.score(self.manifest, results, context.capabilities, self.request.language)
        record = Record(
            id=str(ULID()),
            assignment=AssignmentRef(
                id=self.manifest.id,
                version=self.manifest.version,
                title=self.manifest.title.in_language(self.request.language),
            ),
            submission=self.submission,
            runner=self._runner(built),
            started_at=started,
            duration_s=(datetime.now(UTC) - started).total_seconds(),
            phases=Phases(**self.watch.seconds),
            score=scored.score,
            available=scored.available,
            maximum=scored.maximum,
            status=scored.status,
            provisional=scored.provisional,
            provisional_reason=scored.provisional_reason,
            items=scored.items,
            flags=self.flags,
            environment=self._environment(seed, built, context),
            artifacts=artifacts(logs),
        )
        return Grading(record, logs)

    def _runner(self, built: BuildResult | None) -> Runner:
        docker = self.request.runner == "docker"
        return Runner(
            kind=self.request.runner,
            isolated=docker,
            image=self.image.run if docker else None,
            image_digest=self.image.digest if docker else None,
            devices=("cpu", *(f"cuda:{index}" for index in range(self.request.gpus))),
            cpu=f"{platform.machine()}, {os.cpu_count()} cores",
            torch=metadata.version("torch"),
            toolchain=built.toolchain if built is not None else "",
        )

    def _environment(self, seed: int, built: BuildResult | None, context: Context) -> dict[str, Any]:
        found: dict[str, Any] = {
            "language": self.request.language,
            "seed": seed,
            "grader": metadata.version("tinyinfinitrain-grader"),
            "python": platform.python_version(),
        }
        if built is not None:
            errors = [error.model_dump(exclude={"target"}) for error in context.build_errors]
            found["build"] = {"errors": errors, "used_build_file": built.used_build_file}
            found["official_tests"] = (
                f"{self.manifest.origin.commit[:12]}" if self.originals and self.manifest.origin else "unavailable"
            )
        return found


def _probes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "probes").glob("*")) if path.is_file()}


def _official(manifest: Manifest, originals: Mapping[str, bytes] | None) -> dict[str, Official]:
    """Return the official cases of each item, read from the originals."""
    return {
        item.id: Official(target=Path(item.official).stem, cases=declared_cases(originals[item.official]))
        for item in manifest.items
        if originals is not None and item.official is not None and item.official in originals
    }


def _build_errors(built: BuildResult | None) -> tuple[BuildError, ...]:
    if built is None:
        return ()
    return tuple(
        BuildError(target=error.target, path=error.path, line=error.line, column=error.column, message=error.message)
        for error in built.errors
    )


def _build_ending(built: BuildResult | None) -> Literal["finished", "timeout", "out_of_memory"]:
    if built is None or not (built.timed_out or built.out_of_memory):
        return "finished"
    return "out_of_memory" if built.out_of_memory else "timeout"


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
