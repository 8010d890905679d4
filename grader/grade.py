"""The pipeline: a link goes in, gradings come out. `grade` reads from top to bottom."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol


class Progress(Protocol):
    """Who is told how far a grading is."""

    def phase(self, name: str) -> None:
        """A phase begins: fetch, prepare, build, run, judge."""
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
    runner: Literal["docker", "local"] = "docker"
    gpus: int = 0
    language: Literal["en", "zh"] = "en"
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

    link: str
    repository: str
    ref: str
    commit: str
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
        chosen = _choose(request, source, known)
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
    return _Source(request.link, link.repository, link.ref, commit, mirror, mirrors)


def _choose(request: Request, source: _Source, known: Mapping[str, Manifest]) -> tuple[Manifest, ...]:
    paths = [entry.path for entry in source.mirror.listing(source.commit)]
    found = workspace.detect(paths, known)
    if request.assignment is not None:
        return (known[request.assignment],)
    if not found:
        raise SourceError(
            f"commit {source.commit[:12]} of {source.repository} holds no assignment that is known here",
            f"name one with --assignment: {', '.join(known)}; or hand in the commit that holds your work",
        )
    return tuple(known[name] for name in found)


def _needs_commit(link: url.Link, mirrors: Mirrors) -> GraderError:
    """Return the refusal of a link without a commit, with the exact link to hand in where it can be found out."""
    try:
        mirror = mirrors.open(link.repository)
        mirror.update()
        branches = mirror.branches()
    except GraderError as error:
        return error if isinstance(error, SourceError) else UsageError(f"{link.repository} names no commit")
    named = [branch for branch in branches if branch.name == link.ref] or list(branches[:3])
    exact = ", ".join(f"{link.repository}/tree/{branch.commit} ({branch.name})" for branch in named)
    return UsageError(
        f"the link names {f'the branch {link.ref!r}' if link.ref else 'a repository'}, not a commit; a branch moves on",
        f"hand in the commit itself: {exact}" if exact else "hand in a link that ends in /tree/<commit>",
    )


def _grade_one(request: Request, settings: Settings, source: _Source, manifest: Manifest, watch: Stopwatch) -> Grading:
    image = _image(request.runner, manifest)
    cache = ResultCache(settings.cache / "results")
    key = _key(request, settings, source, manifest, image)
    kept = None if request.fresh else cache.get(key)
    if kept is not None:
        watch.progress.note("this commit was graded before; the result is from the cache (--fresh grades again)")
        return Grading(kept.record.model_copy(update={"submission": _submission(request, source)}), kept.files)
    with watch.phase("prepare"):
        originals = _originals(manifest, source.mirrors)
        given = _given(manifest)
        prepared = workspace.prepare(manifest, source.mirror, source.commit, originals, given)
    job = _Job(request, settings, manifest, image, prepared, originals)
    grading = _run(job, source, watch)
    cache.put(key, grading)
    return grading
