"""Mirrors of students' repositories, fetched incrementally and without contents until they are needed.

A mirror is a bare repository in the cache, named by a hash of the address. Whatever writes to it holds its lock;
reading needs none. Only commits that the repository's own branches, tags and pull requests lead to count: a host
serves the commits of every fork under the name of any of them.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from grader.errors import GraderError, InfrastructureError, SourceError
from grader.intake import fetching, objects
from grader.intake.git_command import Git, GitError
from grader.intake.objects import Branch, Entry, Kind

__all__ = ["Branch", "Entry", "Kind", "Mirror", "Mirrors"]

_MAX_CANDIDATES = 10

T = TypeVar("T")


class Mirrors:
    """All mirrors of one cache.

    Args:
        cache: The folder; made where it is missing.
        timeout_s: For any one git command, and for waiting for another process that fetches the same repository.
        max_pack_bytes: Cap of what one fetch may bring.
    """

    def __init__(self, cache: Path, *, timeout_s: float = 300.0, max_pack_bytes: int = 2 << 30) -> None:
        self._cache = cache
        self._timeout_s = timeout_s
        self._max_pack_bytes = max_pack_bytes

    def open(self, repository: str) -> "Mirror":
        """Return the mirror of a repository; nothing is fetched before `update`."""
        name = hashlib.sha256(repository.encode()).hexdigest()[:32]
        return Mirror(repository, Git(self._cache / f"{name}.git", self._timeout_s, self._max_pack_bytes))


class Mirror:
    """The mirror of one repository. Commits are named by all their 40 digits, but for `resolve`."""

    def __init__(self, repository: str, git: Git) -> None:
        self.repository = repository
        self._git = git
        self._lock = FileLock(git.git_dir.with_suffix(".lock"), timeout=git.timeout_s)

    def update(self) -> None:
        """Fetch what is new. A mirror that is broken, or was cut off while it was made, is made anew.

        Raises:
            SourceError: The repository is missing or denied.
            InfrastructureError: It could not be reached, or another process holds it for too long.
        """
        with self._locked():
            try:
                if self._git.git_dir.exists():
                    fetching.fetch_commits(self._git)
                    return
            except GitError:
                pass
            self._rebuild()

    def has(self, commit: str) -> bool:
        """Tell whether a commit is in the mirror already."""
        try:
            return self._git.git_dir.exists() and self._git("cat-file", "-t", commit) == b"commit\n"
        except GitError:
            return False

    def resolve(self, ref: str) -> str:
        """Return all digits of the commit that begins so, and that a branch, tag or pull request leads to.

        Raises:
            SourceError: No such commit, several, or one that nothing leads to.
        """
        found = sorted(c for c in self._healed(lambda: objects.reachable(self._git)) if c.startswith(ref.lower()))
        if not found:
            raise self._missing(ref.lower())
        if len(found) > 1:
            raise _ambiguous(ref, found)
        return found[0]

    def branches(self) -> tuple[Branch, ...]:
        """Return all branches, the one with the newest commit first."""
        return self._healed(lambda: objects.branches(self._git))

    def default_branch(self) -> str | None:
        """Ask the server for the name of its default branch; None where it does not tell."""
        try:
            told = self._git("ls-remote", "--symref", fetching.REMOTE, "HEAD").decode("utf-8", "replace")
        except GraderError:
            return None
        found = re.search(r"^ref: refs/heads/(\S+)\tHEAD$", told, re.MULTILINE)
        return found[1] if found else None

    def listing(self, commit: str) -> tuple[Entry, ...]:
        """Return every file of a commit, in git's order.

        Raises:
            SourceError: Git cannot read the commit's tree, or it unfolds beyond all measure.
        """
        try:
            return self._healed(lambda: objects.entries(self._git, commit))
        except GitError as error:
            raise SourceError(
                f"git cannot read the tree of commit {commit[:12]}: {error.what}", "hand in another commit"
            ) from error

    def read(
        self,
        commit: str,
        paths: Collection[str],
        *,
        max_file_bytes: int | None = None,
        max_total_bytes: int | None = None,
    ) -> dict[str, bytes]:
        """Return the contents of files of a commit by path; what is not here yet is fetched in one batch.

        A file is left out of the result where the commit has none of that name, where it is larger than
        `max_file_bytes`, or where the server itself lacks it. Of a link, the content is the link's target.

        Raises:
            SourceError: Together they are larger than `max_total_bytes`.
        """
        asked = frozenset(paths)
        wanted = {e.path: e.object_id for e in self.listing(commit) if e.path in asked and e.kind is not Kind.SUBMODULE}
        sizes = self._fetched(frozenset(wanted.values()))
        cap = max_file_bytes if max_file_bytes is not None else self._git.max_file_bytes
        fitting = {path: name for path, name in wanted.items() if name in sizes and sizes[name] <= cap}
        total = sum(sizes[name] for name in fitting.values())
        if max_total_bytes is not None and total > max_total_bytes:
            raise SourceError(
                f"the files to grade hold {total} bytes together, the cap is {max_total_bytes}",
                "remove what does not belong to the work",
            )
        names = frozenset(fitting.values())
        contents = self._healed(lambda: objects.contents(self._git, names, total), names)
        return {path: contents[name] for path, name in fitting.items()}

    def pin(self, commit: str) -> None:
        """Keep a commit for ever, also when its branch is deleted or rewritten."""
        with self._locked():
            self._git("update-ref", f"refs/grader/{commit}", commit)

    def _missing(self, ref: str) -> SourceError:
        """Say what is known of a commit that no branch, tag or pull request leads to."""
        branch = next((branch for branch in self.branches() if branch.name.lower() == ref), None)
        if branch is not None:
            return SourceError(f"{ref!r} is a branch, which moves on", f"hand in its newest commit {branch.commit}")
        if objects.holds_commit(self._git, ref):
            return SourceError(
                f"no branch, tag or pull request of {self.repository} leads to commit {ref} any more",
                "push it to a branch again, or hand in a commit that is on one",
            )
        return SourceError(
            f"commit {ref} is on no branch, tag or pull request of {self.repository}",
            "push it there; a commit of another fork is handed in with that fork's address",
        )

    def _fetched(self, object_ids: frozenset[str]) -> dict[str, int]:
        """Fetch what is missing of these blobs, and return the sizes of those that could be had."""
        sizes = objects.sizes(self._git, object_ids)
        if len(sizes) == len(object_ids):
            return sizes
        with self._locked():
            fetching.fetch_contents(self._git, object_ids)
        return objects.sizes(self._git, object_ids)

    def _healed(self, operation: Callable[[], T], contents: frozenset[str] = frozenset()) -> T:
        """Do it; where git cannot, make the mirror anew, with these blobs, and try once more."""
        try:
            return operation()
        except GitError:
            with self._locked():
                self._rebuild()
                fetching.fetch_contents(self._git, contents)
            return operation()

    def _rebuild(self) -> None:
        """Make the mirror aside, and put it in its place only when it is whole.

        Of what was pinned, that is kept which something still leads to.
        """
        place = self._git.git_dir
        for left_over in place.parent.glob(f"{place.name}.*.part"):
            shutil.rmtree(left_over, ignore_errors=True)
        pins = self._pins()
        made, old = (Path(tempfile.mkdtemp(prefix=f"{place.name}.", suffix=".part", dir=place.parent)) for _ in "12")
        try:
            fetching.make(replace(self._git, git_dir=made), self.repository)
            if place.exists():
                os.replace(place, old)
            os.replace(made, place)
            for commit in filter(self.has, pins):
                self._git("update-ref", f"refs/grader/{commit}", commit)
        finally:
            shutil.rmtree(made, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def _pins(self) -> list[str]:
        try:
            return self._git("for-each-ref", "--format=%(refname:lstrip=2)", "refs/grader").decode().split()
        except GitError:  # nothing there yet, or too broken even for that
            return []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the mirror against every other process and thread."""
        self._git.git_dir.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise InfrastructureError(
                f"another grading has been fetching {self.repository} for over {self._git.timeout_s:g} s", "try again"
            ) from error
        try:
            yield
        finally:
            self._lock.release()


def _ambiguous(ref: str, found: list[str]) -> SourceError:
    candidates = ", ".join(commit[:12] for commit in found[:_MAX_CANDIDATES])
    more = f" and {len(found) - _MAX_CANDIDATES} more" if len(found) > _MAX_CANDIDATES else ""
    return SourceError(
        f"{ref!r} is the beginning of {len(found)} commits: {candidates}{more}",
        "hand in the link with more digits of the commit that you mean",
    )
