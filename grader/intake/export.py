"""From a commit's tree to the files that an assignment takes: names, links and sizes are looked at first."""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

import pathspec

from grader.assignment.manifest import Policy
from grader.errors import SourceError
from grader.intake.findings import Finding, one, together
from grader.intake.repository import Entry, Kind, Mirror

_LONGEST_NAME = 255  # bytes, of every common file system
_LONGEST_PATH = 1_024
_MOST_HOPS = 8
_RESULT_FILES = frozenset({"record.json", "junit.xml", "results.json"})
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was taken from a commit.

    Attributes:
        files: Contents by path.
        object_ids: Of every entry that the policy exports or overlays, whether or not it was read.
        findings: What was left out, and why.
    """

    files: Mapping[str, bytes]
    object_ids: Mapping[str, str]
    findings: tuple[Finding, ...]


def patterns(lines: tuple[str, ...]) -> pathspec.GitIgnoreSpec:
    """Return what matches paths in gitignore's pattern language."""
    return pathspec.GitIgnoreSpec.from_lines(lines)


def export(policy: Policy, mirror: Mirror, commit: str, known: Mapping[str, bytes]) -> Exported:
    """Take the files that a policy exports.

    Args:
        policy: Which files, and their caps.
        mirror: The student's repository.
        commit: 40 hexadecimal digits.
        known: Contents that need not be fetched, by git's name for them.

    Raises:
        SourceError: There are too many files, or they are too large together.
        InfrastructureError: They cannot be fetched.
    """
    entries = mirror.listing(commit)
    takes, covers = patterns(policy.export), patterns(policy.overlay)
    matching = {entry.path: entry for entry in entries if takes.match_file(entry.path)}
    usable = {path: entry for path, entry in matching.items() if is_usable(path)}
    wanted = {path: entry for path, entry in usable.items() if entry.kind is not Kind.SUBMODULE}
    _check_count(policy, len(wanted))
    contents = _contents(policy, mirror, commit, wanted, known)
    files, symlink_findings = _follow(policy, wanted, contents)
    _check_total(policy, files)
    findings = [
        *together("name", "warning", sorted(matching.keys() - usable), "left out, for no safe file can have that name"),
        *_result_findings(entries),
        *_left_out_findings(policy, mirror, commit, wanted.keys() - contents),
        *symlink_findings,
        *_pointer_findings(files),
    ]
    covered = {entry.path: entry.object_id for entry in entries if covers.match_file(entry.path)}
    return Exported(files, covered | {path: entry.object_id for path, entry in wanted.items()}, tuple(findings))


def is_usable(path: str) -> bool:
    """Tell whether a path can be written below a folder, on every system, and shown to a person."""
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or len(path.encode()) > _LONGEST_PATH:
        return False
    return all(
        part not in ("", ".", "..") and part.lower() != ".git" and len(part.encode()) <= _LONGEST_NAME for part in parts
    )


def _contents(
    policy: Policy, mirror: Mirror, commit: str, wanted: Mapping[str, Entry], known: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return what could be read: of links their targets, of known objects what is known."""
    here = {path: known[entry.object_id] for path, entry in wanted.items() if entry.object_id in known}
    fetched = mirror.read(
        commit,
        wanted.keys() - here,
        max_file_bytes=policy.max_file_bytes,
        max_total_bytes=policy.max_total_bytes,
    )
    return here | fetched


def _follow(
    policy: Policy, wanted: Mapping[str, Entry], contents: Mapping[str, bytes]
) -> tuple[dict[str, bytes], list[Finding]]:
    """Put in place of each symbolic link what it leads to inside the exported tree."""
    files = {path: content for path, content in contents.items() if wanted[path].kind is Kind.FILE}
    links = {
        path: content.decode("utf-8", "surrogateescape")
        for path, content in contents.items()
        if wanted[path].kind is Kind.SYMLINK
    }
    followed: dict[str, bytes] = {}
    refused = []
    for path in links:
        target = _target(path, links)
        below = {} if target is None else _at(target, path, files)
        followed |= below
        _check_count(policy, len(files) + len(followed))
        if not below:
            refused.append(path)
    message = "left out: the symbolic link leads to nothing inside the exported files"
    return files | followed, together("symlink", "warning", refused, message)


def _target(path: str, links: Mapping[str, str]) -> str | None:
    """Return where a link leads in the end, from the root; None where it leads out of the tree or in circles."""
    for _ in range(_MOST_HOPS):
        if path not in links:
            return path
        if links[path].startswith("/"):
            return None
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), links[path]))
        if path == "." or path.startswith(".."):
            return None
    return None


def _at(target: str, link: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the file, or all files of the folder, that a link leads to, under the link's own name."""
    if target in files:
        return {link: files[target]}
    if f"{link}/".startswith(f"{target}/"):
        return {}  # a folder that would contain itself
    below = {path: content for path, content in files.items() if path.startswith(f"{target}/")}
    renamed = {link + path[len(target) :]: content for path, content in below.items()}
    return {path: content for path, content in renamed.items() if is_usable(path)}


def _check_count(policy: Policy, count: int) -> None:
    if count > policy.max_files:
        raise SourceError(
            f"the commit holds {count} files of this assignment, the cap is {policy.max_files}",
            "remove generated files from the repository",
        )


def _check_total(policy: Policy, files: Mapping[str, bytes]) -> None:
    total = sum(map(len, files.values()))
    if total > policy.max_total_bytes:
        raise SourceError(
            f"the commit's files hold {total} bytes together, the cap is {policy.max_total_bytes}",
            "remove large files from the commit",
        )


def _result_findings(entries: tuple[Entry, ...]) -> list[Finding]:
    committed = [e.path for e in entries if posixpath.basename(e.path).lower() in _RESULT_FILES]
    return together("result_file", "alert", committed, "a committed result is ignored")


def _left_out_findings(policy: Policy, mirror: Mirror, commit: str, unread: set[str]) -> list[Finding]:
    """Say why files were not read: their size, which is known only now, or a server that lacks them."""
    if not unread:
        return []
    sizes = {entry.path: entry.size for entry in mirror.listing(commit) if entry.path in unread}
    large = sorted(path for path, size in sizes.items() if size is not None)
    absent = sorted(path for path, size in sizes.items() if size is None)
    cap = f"left out: larger than {policy.max_file_bytes} bytes"
    return [
        *together("too_large", "warning", large, cap),
        *together("absent", "warning", absent, "left out: the repository's server lacks the content"),
    ]


def _pointer_findings(files: Mapping[str, bytes]) -> list[Finding]:
    message = "is a pointer to Git LFS, whose content is not fetched"
    return [one("lfs", "warning", path, message) for path in sorted(files) if files[path].startswith(_LFS_POINTER)]
