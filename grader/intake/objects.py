"""What a bare repository holds, read as objects: nothing is checked out, and nothing is fetched by the way."""

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from grader.errors import SourceError
from grader.intake.git_command import Git, GitError, OutputTooLargeError

SPACES = ("refs/heads", "refs/tags", "refs/pull", "refs/merge-requests")
_MAX_LISTING_BYTES = 32 << 20
_LAST_SECOND = 253_402_300_799  # of the year 9999: a commit may claim any date


class Kind(StrEnum):
    """What an entry of a tree is."""

    FILE = "file"
    SYMLINK = "symlink"
    SUBMODULE = "submodule"


_KINDS = {"120000": Kind.SYMLINK, "160000": Kind.SUBMODULE}


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a commit.

    Attributes:
        path: From the repository's root; bytes that are not UTF-8 are kept as surrogates.
        mode: As git writes it, `100644`.
        object_id: 40 hexadecimal digits.
        size: In bytes, None where the content was not fetched yet.
    """

    path: str
    mode: str
    kind: Kind
    object_id: str
    size: int | None


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch and its newest commit."""

    name: str
    commit: str
    date: datetime


def entries(git: Git, commit: str) -> tuple[Entry, ...]:
    """Return every file of a commit, in git's order.

    Raises:
        SourceError: The tree unfolds beyond all measure.
        GitError: Git cannot read it.
    """
    try:
        output = git("ls-tree", "-r", "-z", "--full-tree", commit, max_output_bytes=_MAX_LISTING_BYTES)
    except OutputTooLargeError as error:
        raise SourceError(
            f"the tree of commit {commit[:12]} holds too many files to be read", "hand in the work alone"
        ) from error
    rows = [row.partition(b"\t") for row in output.split(b"\0") if row]
    split = [(about.decode().split(), path.decode("utf-8", "surrogateescape")) for about, _, path in rows]
    known = sizes(git, {object_id for (_, kind, object_id), _ in split if kind == "blob"})
    return tuple(
        Entry(path, mode, _KINDS.get(mode, Kind.FILE), object_id, known.get(object_id))
        for (mode, _, object_id), path in split
    )


def sizes(git: Git, object_ids: Collection[str]) -> dict[str, int]:
    """Return the sizes in bytes of those blobs that are here."""
    if not object_ids:
        return {}
    output = git("cat-file", "--batch-check=%(objectname) %(objecttype) %(objectsize)", stdin=lines(object_ids))
    rows = [line.split() for line in output.decode().splitlines()]
    return {row[0]: int(row[2]) for row in rows if len(row) == 3 and row[1] == "blob"}


def contents(git: Git, object_ids: Collection[str], total: int) -> dict[str, bytes]:
    """Return the contents of blobs that are here, `total` bytes together, each checked against its name.

    Raises:
        GitError: One is missing, or is not what its name says.
    """
    if not object_ids:
        return {}
    output = git("cat-file", "--batch", stdin=lines(object_ids), max_output_bytes=total + 128 * (len(object_ids) + 1))
    found: dict[str, bytes] = {}
    position = 0
    while position < len(output):
        end = output.index(b"\n", position)
        object_id, *about = output[position:end].decode().split()
        if len(about) != 2:
            raise GitError(f"the mirror lacks object {object_id}")
        position = end + 1 + int(about[1])
        found[object_id] = _verified(object_id, output[end + 1 : position])
        position += 1
    return found


def branches(git: Git) -> tuple[Branch, ...]:
    """Return all branches, the one with the newest commit first."""
    shape = "%(refname:lstrip=2)%00%(objectname)%00%(committerdate:unix)"
    output = git("for-each-ref", f"--format={shape}", "refs/heads").decode("utf-8", "replace")
    rows = (line.split("\0") for line in output.splitlines())
    found = (Branch(name, commit, _date(seconds)) for name, commit, seconds in rows)
    return tuple(sorted(found, key=lambda branch: branch.date, reverse=True))


def reachable(git: Git) -> list[str]:
    """Return every commit that a branch, a tag or a pull request leads to."""
    return git("rev-list", *(f"--glob={space}/*" for space in SPACES)).decode().split()


def holds_commit(git: Git, beginning: str) -> bool:
    """Tell whether a commit of that name is here, whether or not anything leads to it."""
    if re.fullmatch(r"[0-9a-f]{4,40}", beginning) is None:
        return False
    found = git("rev-parse", f"--disambiguate={beginning}").decode().split()
    told = git("cat-file", "--batch-check=%(objecttype)", stdin=lines(found)) if found else b""
    return b"commit" in told.split()


def lines(object_ids: Iterable[str]) -> bytes:
    """Return the names as git reads them, one a line."""
    return "".join(f"{object_id}\n" for object_id in object_ids).encode()


def _verified(object_id: str, content: bytes) -> bytes:
    """Return the content, once it is what git's name for it says."""
    if blob_id(content) != object_id:
        raise GitError(f"object {object_id} of the mirror is damaged")
    return content


def blob_id(content: bytes) -> str:
    """Return the name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _date(seconds: str) -> datetime:
    try:
        return datetime.fromtimestamp(min(max(int(seconds), 0), _LAST_SECOND), UTC)
    except ValueError:  # git prints nothing where it cannot read the date
        return datetime.fromtimestamp(0, UTC)
