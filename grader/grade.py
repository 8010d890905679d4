"""The pipeline: a link goes in, gradings come out. `grade` reads from top to bottom, and so does `job.Job.run`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from grader import signature
from grader.assignment import manifest as manifests
from grader.assignment.manifest import Manifest
from grader.errors import GraderError, SourceError, UsageError
from grader.intake import url, workspace
from grader.intake.repository import Mirror, Mirrors
from grader.intake.workspace import Workspace
from grader.job import Image, Job, Language, Progress, Request, Stopwatch
from grader.record import Flag, Submission
from grader.sandbox import owner
from grader.settings import PROJECT_ROOT, Settings
from grader.store import Grading, ResultCache, digest_of, digest_of_folder


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
    if request.runner == "docker":
        owner.reap()
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
    image = Image.of(request.runner, manifest)
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
    job = Job(request, settings, manifest, image, prepared.files, originals, source.submission, flags, watch)
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
    image = Image.of(request.runner, manifest)
    flags = _flags(prepared)
    job = Job(request, settings, manifest, image, prepared.files, None, submission, flags, watch, public_only=True)
    return job.run()


def _key(request: Request, settings: Settings, source: _Source, manifest: Manifest, image: Image) -> str:
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
    """Return the files of the reference that a torch assignment gives."""
    if manifest.track != "torch":
        return {}
    from grader.assignment.starter import given_files  # noqa: PLC0415  (libcst takes a quarter of a second)

    return given_files(manifest, PROJECT_ROOT / "reference")


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
