"""The pipeline: a link goes in, gradings come out. `grade` and `_Job.run` read from top to bottom."""

import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol

from ulid import ULID

from grader import images, signature
from grader.assignment import manifest as manifests
from grader.assignment.manifest import ItemSpec, Manifest
from grader.errors import GraderError, SourceError, UsageError
from grader.intake import url, workspace
from grader.intake.repository import Mirror, Mirrors
from grader.intake.workspace import Workspace
from grader.judge import run as judge
from grader.judge import scoring
from grader.judge.context import BuildError, CheckResult, Context, Official
from grader.record import AssignmentRef, Flag, Phases, Record, Runner, Submission
from grader.settings import PROJECT_ROOT, Settings
from grader.store import Grading, ResultCache, artifacts, digest_of, digest_of_folder
from grader.tracks.cpp.build import BuildResult, Plan, build
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
class _Source:
    """Where the student's files come from, resolved and pinned."""

    submission: Submission
    mirror: Mirror
    mirrors: Mirrors


def grade(request: Request, settings: Settings, progress: Progress) -> tuple[Grading, ...]:
    """Grade every assignment that the commit holds, or the one that was asked for.

    Raises:
        UsageError: The link or the assignment's name cannot be used.
        SourceError: The repository or the commit cannot be had, or holds no assignment.
        InfrastructureError: Our side broke before anything was scored.
    """
    watch = Stopwatch(progress)
    known = manifests.load_all(settings.assignments)
    _check_name(request.assignment, known)
    with watch.phase("fetch"):
        source = _fetch(request, settings)
        chosen = _choose(request.assignment, source, known)
    return tuple(_grade_one(request, settings, source, manifest, watch) for manifest in chosen)


def _check_name(name: str | None, known: Mapping[str, Manifest]) -> None:
    if name is not None and name not in known:
        raise UsageError(f"there is no assignment {name!r}", f"known are: {', '.join(known)}")


def _fetch(request: Request, settings: Settings) -> _Source:
    link = url.parse(request.link, hosts=settings.hosts)
    mirrors = Mirrors(settings.cache / "mirrors", timeout_s=settings.git_timeout_s)
    if link.verdict is url.Verdict.NEEDS_COMMIT:
        raise _needs_commit(link, mirrors)
    url.require_commit(link, allow_local=request.runner == "local")
    mirror = mirrors.open(link.repository)
    mirror.update()
    commit = mirror.resolve(link.ref)
    mirror.pin(commit)
    submission = Submission(
        url=request.link,
        repository=link.repository,
        commit=commit,
        ref_as_given=link.ref,
        student=request.student,
        submitted_at=datetime.now(UTC),
    )
    return _Source(submission, mirror, mirrors)


def _needs_commit(link: url.Link, mirrors: Mirrors) -> GraderError:
    """Return the refusal of a link without a commit, with the exact link to hand in where it can be found out."""
    what = f"the branch {link.ref!r}" if link.ref else "a repository"
    advice = f"hand in the commit itself: {link.repository}/tree/<commit>"
    try:
        mirror = mirrors.open(link.repository)
        mirror.update()
        branches = mirror.branches()
    except GraderError:  # the refusal stands whether or not the repository can be reached
        branches = ()
    named = [branch for branch in branches if branch.name == link.ref] or list(branches[:3])
    if named:
        exact = " or ".join(f"{link.repository}/tree/{branch.commit} ({branch.name})" for branch in named)
        advice = f"hand in the commit itself: {exact}"
    return UsageError(f"the link names {what}, which moves on, and no commit", advice)


def _choose(name: str | None, source: _Source, known: Mapping[str, Manifest]) -> tuple[Manifest, ...]:
    if name is not None:
        return (known[name],)
    paths = [entry.path for entry in source.mirror.listing(source.submission.commit)]
    found = workspace.detect(paths, known)
    if not found:
        submission = source.submission
        raise SourceError(
            f"commit {submission.commit[:12]} of {submission.repository} holds no assignment that is known here",
            f"hand in the commit that holds your work, or name one of {', '.join(known)} with --assignment",
        )
    return tuple(known[each] for each in found)


def _grade_one(request: Request, settings: Settings, source: _Source, manifest: Manifest, watch: Stopwatch) -> Grading:
    image = _Image.of(request.runner, manifest)
    cache = ResultCache(settings.cache / "results")
    key = _key(request, settings, source, manifest, image)
    kept = None if request.fresh else cache.get(key)
    if kept is not None:
        watch.progress.note("this commit was graded before: the result is from the cache; --fresh grades again")
        return _signed(Grading(kept.record.model_copy(update={"submission": source.submission}), kept.files), settings)
    with watch.phase("prepare"):
        originals = _originals(manifest, source.mirrors, watch.progress)
        prepared = workspace.prepare(manifest, source.mirror, source.submission.commit, originals, _given(manifest))
    flags = (*_flags(prepared), *_untouched(manifest, prepared, originals, source))
    job = _Job(request, settings, manifest, image, prepared.files, originals, source.submission, flags, watch)
    grading = job.run()
    cache.put(key, grading)
    return _signed(grading, settings)


def check(
    path: Path, assignment: str | None, language: Language, settings: Settings, progress: Progress
) -> tuple[Grading, ...]:
    """Run the public checks on a working tree, locally. Nothing is fetched, kept or signed.

    Raises:
        UsageError: The tree holds no assignment that can be checked without Docker.
    """
    known = {name: m for name, m in manifests.load_all(settings.assignments).items() if m.track == "torch"}
    _check_name(assignment, known)
    files = workspace.read_tree(path)
    chosen = (assignment,) if assignment else workspace.detect(list(files), known)
    if not chosen:
        raise UsageError(
            f"{path.resolve()} holds no assignment that can be checked here",
            f"go to the top of your repository; without Docker these can be checked: {', '.join(known)}",
        )
    request = Request(link=str(path.resolve()), runner="local", language=language)
    return tuple(_check_one(request, settings, known[name], files, Stopwatch(progress)) for name in chosen)


def _check_one(
    request: Request, settings: Settings, manifest: Manifest, files: Mapping[str, bytes], watch: Stopwatch
) -> Grading:
    prepared = workspace.overlay(manifest, files, None, _given(manifest))
    submission = Submission(
        url=request.link,
        repository=request.link,
        commit="0" * 40,
        ref_as_given="working tree",
        student=None,
        submitted_at=datetime.now(UTC),
    )
    image = _Image.of(request.runner, manifest)
    flags = _flags(prepared)
    job = _Job(request, settings, manifest, image, prepared.files, None, submission, flags, watch, public_only=True)
    return job.run()


@dataclass(frozen=True, slots=True)
class _Image:
    """The images that a grading uses, by what for; empty names for the local runner."""

    build: str = ""
    run: str = ""
    digest: str = ""

    @classmethod
    def of(cls, runner: RunnerKind, manifest: Manifest) -> "_Image":
        if runner == "local":
            return cls()
        names: tuple[images.Name, images.Name] = ("cpp", "cpp-run") if manifest.track == "cpp" else ("torch", "torch")
        build_tag, run_tag = (images.require(name) for name in names)
        return cls(build_tag, run_tag, digest_of([images.digest(build_tag), images.digest(run_tag)]))


@dataclass(frozen=True, slots=True)
class _Job:
    """One assignment of one commit, ready to be built and judged."""

    request: Request
    settings: Settings
    manifest: Manifest
    image: _Image
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
            built = self._build() if self.manifest.track == "cpp" else None
            context = self._context(folder, built, seed)
            with self.watch.phase("judge"):
                results = judge.run(context, self._say, workers=self._workers())
            logs = self._logs(context, built)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self._grading(started, seed, built, context, results, logs)

    def _build(self) -> BuildResult:
        originals = self.originals or {}
        plan = Plan(
            files=self.files,
            build_file=originals.get("CMakeLists.txt"),
            tests=tuple(Path(item.official).stem for item in self._official_items() if item.official),
            probes=_probes(self.settings.assignments / self.manifest.id),
            timeout_s=self.manifest.limits.build_s,
            memory_bytes=self.manifest.limits.memory_mib << 20,
            cuda=self.request.gpus > 0,
            cache=self._compile_cache(),
            label=self.submission.commit[:12],
        )
        with self.watch.phase("build"):
            return build(self.request.runner, self.image.build, plan)

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
        owner = digest_of([self.submission.student or "", self.submission.repository])
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
        return min(self.settings.judge_workers, os.cpu_count() or 1)

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


def _key(request: Request, settings: Settings, source: _Source, manifest: Manifest, image: _Image) -> str:
    """Name everything that a result depends on: the commit, the assignment, our own code, the runner."""
    submission = source.submission
    return digest_of(
        [
            submission.repository,
            submission.commit,
            digest_of_folder(settings.assignments / manifest.id),
            digest_of_folder(PROJECT_ROOT / "grader", "**/*.py"),
            digest_of_folder(PROJECT_ROOT / "reference", "**/*.py"),
            request.runner,
            image.digest,
            str(request.gpus),
            request.language,
        ]
    )


def _signed(grading: Grading, settings: Settings) -> Grading:
    if settings.signing_key is None:
        return grading
    return Grading(signature.sign(grading.record, signature.load_key(settings.signing_key)), grading.files)


def _originals(manifest: Manifest, mirrors: Mirrors, progress: Progress) -> Mapping[str, bytes] | None:
    """Return the original files at the pinned commit, or None where they cannot be had."""
    if manifest.origin is None:
        return None
    try:
        mirror = mirrors.open(manifest.origin.repository)
        if not mirror.has(manifest.origin.commit):
            mirror.update()
        return workspace.originals(manifest, mirror, manifest.origin.commit)
    except GraderError as error:
        progress.note(f"the original tests cannot be had, so probes alone decide: {error.what}")
        return None


def _given(manifest: Manifest) -> dict[str, bytes]:
    """Return the files of the reference that a torch assignment gives, under the student's package's name."""
    reference = PROJECT_ROOT / "reference"
    return {f"parallel/{name}": (reference / name).read_bytes() for name in manifest.policy.given}


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


def _flags(prepared: Workspace) -> tuple[Flag, ...]:
    return tuple(
        Flag(kind=each.kind, severity=each.severity, path=each.path, line=each.line, message=each.message)
        for each in prepared.findings
    )


def _untouched(
    manifest: Manifest, prepared: Workspace, originals: Mapping[str, bytes] | None, source: _Source
) -> tuple[Flag, ...]:
    """Say it where the commit is the untouched starter, and name the branches that may hold the work."""
    if originals is None or any(prepared.files.get(path) != content for path, content in originals.items()):
        return ()
    others = [each for each in source.mirror.branches() if each.commit != source.submission.commit]
    names = ", ".join(f"{branch.name} ({branch.commit[:12]})" for branch in others[:5])
    where = f"; other branches: {names}" if names else ""
    return (Flag(kind="untouched", severity="warning", message=f"this commit is the untouched starter{where}"),)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
