"""Mirrors of students' repositories: fetched without blobs first, then the needed ones in one batch, never checked out.

A mirror is a bare repository of ours, named by its address. It is no partial clone by its own configuration (only
while fetching), so that a blob that is missing is just missing: no read ever goes to the network by itself.
"""

import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import filelock

from grader.errors import InfrastructureError, SourceError
from grader.intake import git
from grader.intake.git import GitError

_REFSPECS = (
    "+refs/heads/*:refs/mirror/heads/*",
    "+refs/tags/*:refs/mirror/tags/*",
    "+refs/pull/*/head:refs/mirror/pull/*",
    "+refs/merge-requests/*/head:refs/mirror/merge-requests/*",
)
_PARTIAL = ("-c", "remote.origin.promisor=true", "-c", "remote.origin.partialclonefilter=blob:none")
_NO_FILTER = re.compile(r"filtering not recognized|does not support.*filter|filter.*not supported", re.IGNORECASE)
_SHOWN_CANDIDATES = 5


class Kind(StrEnum):
    """What an entry of a tree is."""

    FILE = "file"
    SYMLINK = "symlink"
    SUBMODULE = "submodule"


_KINDS = {
    b"100644": Kind.FILE,
    b"100755": Kind.FILE,
    b"100664": Kind.FILE,
    b"120000": Kind.SYMLINK,
    b"160000": Kind.SUBMODULE,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a commit. A name that is not UTF-8 has surrogate escapes."""

    path: str
    kind: Kind
    object_id: str


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch and when its last commit was made."""

    name: str
    commit: str
    date: datetime


class Mirrors:
    """All mirrors, in one folder. Safe under parallel use by several processes."""

    def __init__(self, cache: Path, *, timeout_s: float = 300.0) -> None:
        self._cache = cache
        self._timeout_s = timeout_s

    def open(self, repository: str) -> "Mirror":
        """Return the mirror of a repository; nothing is fetched yet."""
        name = hashlib.sha256(repository.encode()).hexdigest()[:32]
        return Mirror(repository, self._cache / f"{name}.git", self._timeout_s)


class Mirror:
    """A local copy of one repository's history, and of those blobs that were needed."""

    def __init__(self, repository: str, folder: Path, timeout_s: float) -> None:
        self.repository = repository
        self._folder = folder
        self._timeout_s = timeout_s

    def update(self) -> None:
        """Fetch what is new: heads, tags and pull requests.

        Raises:
            SourceError: The repository does not exist or may not be read.
            InfrastructureError: The network or the host is down, or too slow.
        """
        with self._lock():
            try:
                self._make()
                self._fetch(_REFSPECS)
            except GitError as error:
                self._fetch_anew(error)

    def has(self, commit: str) -> bool:
        """Say whether a commit (40 hexadecimal digits) is here already."""
        return self._folder.is_dir() and self._types([commit]).get(commit) == "commit"

    def resolve(self, ref: str) -> str:
        """Return the 40 digits of the commit that 4 or more hexadecimal digits begin.

        Raises:
            SourceError: No commit of this repository begins so, or several do.
        """
        prefix = ref.lower()
        listed = self._git(["rev-parse", f"--disambiguate={prefix}"]).decode().split()
        types = self._types(listed)
        commits = [each for each in listed if types.get(each) == "commit" and self._is_reachable(each)]
        if len(commits) == 1:
            return commits[0]
        if commits:
            shown = ", ".join(commits[:_SHOWN_CANDIDATES])
            raise SourceError(f"{ref!r} begins {len(commits)} commits: {shown}", "hand in more digits of the one meant")
        raise SourceError(
            f"{self.repository} has no commit {ref!r} on a branch, a tag or a pull request",
            "push the commit to this repository, and check the link",
        )

    def pin(self, commit: str) -> None:
        """Keep a commit for good, even where its branch is deleted or rewritten."""
        self._git(["update-ref", f"refs/grader/{commit}", commit])

    def branches(self) -> tuple[Branch, ...]:
        """Return the branches, the one with the newest commit first."""
        form = "%(refname:lstrip=3)%00%(objectname)%00%(committerdate:unix)"
        lines = self._git(["for-each-ref", "--sort=-committerdate", f"--format={form}", "refs/mirror/heads"])
        rows = (line.split("\0") for line in lines.decode("utf-8", "replace").splitlines())
        return tuple(Branch(name, commit, datetime.fromtimestamp(int(date), UTC)) for name, commit, date in rows)

    def listing(self, commit: str) -> tuple[Entry, ...]:
        """Return every path of a commit. Sizes are not known: asking for them would fetch every blob."""
        raw = self._git(["ls-tree", "-r", "-z", "--full-tree", commit])
        return tuple(_entry(line) for line in raw.split(b"\0") if line)

    def sizes(self, object_ids: Iterable[str]) -> dict[str, int]:
        """Return the sizes in bytes of those blobs that are here."""
        answer = self._git(["cat-file", "--batch-check=%(objectname) %(objectsize)"], _lines(object_ids)).decode()
        rows = (line.split() for line in answer.splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}

    def need(self, object_ids: Iterable[str]) -> None:
        """Fetch those blobs that are not here yet, in one batch.

        Raises:
            InfrastructureError: The repository does not hand them out.
        """
        wanted = sorted(set(object_ids))
        with self._lock():
            missing = [each for each in wanted if each not in self.sizes(wanted)] if wanted else []
            if missing:
                options = [*_PARTIAL, "-c", "fetch.negotiationAlgorithm=noop", "fetch", "--quiet", "--no-tags"]
                options += ["--no-write-fetch-head", "--filter=blob:none", "--stdin", "origin"]
                self._git(options, _lines(missing))

    def read(self, commit: str, paths: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of files at a commit; a path that is no file there is left out."""
        wanted = set(paths)
        entries = {e.path: e.object_id for e in self.listing(commit) if e.path in wanted and e.kind is Kind.FILE}
        self.need(entries.values())
        blobs = self.blobs(entries.values())
        return {path: blobs[object_id] for path, object_id in entries.items() if object_id in blobs}

    def blobs(self, object_ids: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of those blobs that are here."""
        answer = self._git(["cat-file", "--batch"], _lines(sorted(set(object_ids))))
        return dict(_batch(answer))

    def _types(self, object_ids: Iterable[str]) -> Mapping[str, str]:
        answer = self._git(["cat-file", "--batch-check=%(objectname) %(objecttype)"], _lines(object_ids)).decode()
        rows = (line.split() for line in answer.splitlines())
        return {row[0]: row[1] for row in rows if len(row) == 2}

    def _is_reachable(self, commit: str) -> bool:
        """Only what the repository itself points to counts: hosts hand out commits of other forks too."""
        listed = self._git(["for-each-ref", "--count=1", f"--contains={commit}", "refs/mirror", "refs/grader"])
        return bool(listed.strip())

    def _lock(self) -> filelock.FileLock:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self._folder.with_suffix(".lock"), timeout=2 * self._timeout_s)

    def _make(self) -> None:
        if (self._folder / "HEAD").is_file():
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        self._git(["init", "--quiet", "--bare", "--template=", str(self._folder)])
        self._git(["config", "remote.origin.url", self.repository])

    def _fetch(self, refspecs: Iterable[str]) -> None:
        options = ["fetch", "--quiet", "--prune", "--no-tags", "--no-write-fetch-head", "--force"]
        try:
            self._git([*_PARTIAL, *options, "--filter=blob:none", "origin", *refspecs])
        except GitError as error:
            if not _NO_FILTER.search(error.stderr):
                raise
            self._git([*options, "origin", *refspecs])

    def _fetch_anew(self, first: GitError) -> None:
        """A mirror that cannot be fetched into may be damaged (a power cut, a full disk): make it once more."""
        fault = git.source_fault(first, self.repository)
        if fault is not None:
            raise fault from first
        pins = self._pins()
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._make()
            self._fetch(_REFSPECS)
        except GitError as error:
            raise git.source_fault(error, self.repository) or error from first
        for commit in pins:
            if self.has(commit):
                self.pin(commit)

    def _pins(self) -> list[str]:
        try:
            return self._git(["for-each-ref", "--format=%(objectname)", "refs/grader"]).decode().split()
        except InfrastructureError:  # too damaged even for that
            return []

    def _git(self, arguments: list[str], stdin: bytes = b"") -> bytes:
        return git.run(self._folder, arguments, timeout_s=self._timeout_s, stdin=stdin)


def _lines(object_ids: Iterable[str]) -> bytes:
    return "".join(f"{each}\n" for each in object_ids).encode()


def _entry(line: bytes) -> Entry:
    head, _, path = line.partition(b"\t")
    mode, _, object_id = head.split(b" ")
    return Entry(path.decode("utf-8", "surrogateescape"), _KINDS.get(mode, Kind.FILE), object_id.decode())


def _batch(answer: bytes) -> Iterable[tuple[str, bytes]]:
    position = 0
    while position < len(answer):
        end = answer.index(b"\n", position)
        fields = answer[position:end].split()
        position = end + 1
        if len(fields) == 3:
            size = int(fields[2])
            yield fields[0].decode(), answer[position : position + size]
            position += size + 1
