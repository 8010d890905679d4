"""From a commit's tree to the files that are graded: what is taken, what is overlaid, and what a person should see."""

import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import pathspec

from grader.assignment.manifest import Manifest, Policy
from grader.errors import SourceError, UsageError
from grader.intake.repository import Entry, Kind, Mirror
from grader.intake.tokens import first_difference

_LONGEST_NAME = 255
_LONGEST_PATH = 1_024
_RESULT_FILES = frozenset({"record.json", "junit.xml", "results.json"})
_LFS = b"version https://git-lfs.github.com/spec/"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """An edit or a pattern for a person to look at."""

    kind: str
    severity: Literal["info", "warning", "alert"]
    path: str
    line: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Workspace:
    """What is graded.

    Attributes:
        files: Contents by path.
        findings: What a person should see.
        student_files: Which of the files are the student's own version.
    """

    files: Mapping[str, bytes]
    findings: tuple[Finding, ...]
    student_files: frozenset[str]


def detect(paths: Collection[str], manifests: Mapping[str, Manifest]) -> tuple[str, ...]:
    """Return the ids of the assignments whose files are all in a tree."""
    present = set(paths)
    return tuple(name for name, manifest in manifests.items() if present.issuperset(manifest.detect.files))


def originals(manifest: Manifest, mirror: Mirror, commit: str) -> dict[str, bytes]:
    """Return the original files that a manifest exports.

    Raises:
        SourceError: The origin does not hand them out.
    """
    takes = _spec(manifest.policy.export)
    paths = [entry.path for entry in mirror.listing(commit) if takes.match_file(entry.path)]
    return mirror.read(commit, paths)


def prepare(
    manifest: Manifest, mirror: Mirror, commit: str, original: Mapping[str, bytes] | None, given: Mapping[str, bytes]
) -> Workspace:
    """Take from a commit what the manifest exports, and overlay it.

    Args:
        manifest: The assignment.
        mirror: The student's repository.
        commit: 40 hexadecimal digits.
        original: The original files by path, or None where they cannot be had.
        given: Files that replace the student's, by path.

    Raises:
        SourceError: The tree exceeds a cap.
        InfrastructureError: The files cannot be fetched.
    """
    entries = mirror.listing(commit)
    findings = _name_findings(entries)
    usable = {e.path: e for e in entries if _is_usable(e.path)}
    wanted, links = _wanted(manifest.policy, usable)
    findings += links
    _check_count(manifest.policy, wanted)
    mirror.need(wanted.values())
    _check_sizes(manifest.policy, wanted, mirror)
    blobs = mirror.blobs(wanted.values())
    files = {path: blobs[object_id] for path, object_id in wanted.items() if object_id in blobs}
    result = overlay(manifest, files, original, given)
    return Workspace(result.files, (*findings, *result.findings), result.student_files)


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return the files of a working tree that git does not ignore by habit; for a person's own check."""
    skipped = {".git", ".venv", "venv", "__pycache__", "node_modules", "build"}
    found = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not path.is_symlink() and not skipped.intersection(relative.parts):
            found[relative.as_posix()] = path
    if len(found) > 20_000:
        raise UsageError(f"{folder} holds {len(found)} files", "go to the top of your repository")
    return {name: path.read_bytes() for name, path in found.items() if path.stat().st_size <= 4 << 20}


def overlay(
    manifest: Manifest, files: Mapping[str, bytes], original: Mapping[str, bytes] | None, given: Mapping[str, bytes]
) -> Workspace:
    """Replace what is not the student's to decide, tests and given files, and say what was edited elsewhere.

    What a manifest neither overlays nor gives is kept as the student has it: some had to change a header or the build
    file for their compiler. Such an edit is reported and costs nothing.
    """
    policy = manifest.policy
    takes, editable, covered = _spec(policy.export), _spec(policy.editable), _spec(policy.overlay)
    replaced = {path: data for path, data in (original or {}).items() if covered.match_file(path)} | dict(given)
    own = {
        path: data
        for path, data in files.items()
        if takes.match_file(path) and path not in given and not (original is not None and covered.match_file(path))
    }
    findings = _replaced_findings(files, replaced)
    findings += _added_findings(
        sorted(p for p in files if covered.match_file(p) and p not in replaced and p not in own)
    )
    findings += _kept_findings(own, editable, original or {})
    findings += [_lfs_finding(path) for path in sorted(own) if own[path].startswith(_LFS)]
    return Workspace({**own, **replaced}, tuple(findings), frozenset(own))


def _wanted(policy: Policy, usable: Mapping[str, Entry]) -> tuple[dict[str, str], list[Finding]]:
    """Return the object of each file to take; a symlink inside the tree counts as the file it leads to."""
    takes = _spec(policy.export)
    wanted: dict[str, str] = {}
    findings = []
    for path, entry in usable.items():
        if not takes.match_file(path):
            continue
        if entry.kind is Kind.FILE:
            wanted[path] = entry.object_id
        elif entry.kind is Kind.SYMLINK:
            findings.append(Finding("symlink", "warning", path, None, "a symbolic link is not followed; left out"))
    return wanted, findings


def _check_count(policy: Policy, wanted: Mapping[str, str]) -> None:
    if len(wanted) > policy.max_files:
        raise SourceError(
            f"the commit holds {len(wanted)} files of this assignment, the cap is {policy.max_files}",
            "remove generated files from the repository",
        )


def _check_sizes(policy: Policy, wanted: Mapping[str, str], mirror: Mirror) -> None:
    sizes = mirror.sizes(wanted.values())
    for path, object_id in wanted.items():
        if sizes.get(object_id, 0) > policy.max_file_bytes:
            raise SourceError(
                f"{path} has {sizes[object_id]} bytes, the cap is {policy.max_file_bytes}", "remove it from the commit"
            )
    total = sum(sizes.get(object_id, 0) for object_id in wanted.values())
    if total > policy.max_total_bytes:
        raise SourceError(
            f"the commit's files hold {total} bytes together, the cap is {policy.max_total_bytes}",
            "remove large files from the commit",
        )


def _is_usable(path: str) -> bool:
    parts = path.split("/")
    return (
        len(path) <= _LONGEST_PATH
        and not path.startswith("/")
        and all(
            part not in {"", ".", "..", ".git"} and len(part.encode("utf-8", "surrogateescape")) <= _LONGEST_NAME
            for part in parts
        )
        and not any("\ud800" <= letter <= "\udfff" or unicodedata.category(letter) == "Cc" for letter in path)
        and "\\" not in path
    )


def _name_findings(entries: Iterable[Entry]) -> list[Finding]:
    findings = []
    folded: dict[str, str] = {}
    for entry in entries:
        shown = entry.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        shown = "".join(c if unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in shown)[:200]
        if not _is_usable(entry.path):
            findings.append(Finding("name", "warning", shown, None, "a file with such a name is left out"))
            continue
        other = folded.setdefault(entry.path.casefold(), entry.path)
        if other != entry.path:
            findings.append(Finding("name", "info", shown, None, f"differs from {other} by case alone"))
        if PurePosixPath(entry.path).name in _RESULT_FILES:
            findings.append(Finding("result_file", "alert", shown, None, "a committed result is ignored"))
    return findings


def _replaced_findings(files: Mapping[str, bytes], replaced: Mapping[str, bytes]) -> list[Finding]:
    """Say which of the replaced files the student had changed; what differs in layout alone takes one line together."""
    changed = {path: first_difference(path, files[path], replaced[path]) for path in sorted(replaced) if path in files}
    edited = [(path, line) for path, line in changed.items() if line is not None]
    harmless = [path for path, line in changed.items() if line is None and files[path] != replaced[path]]
    findings = [
        Finding("edit", "warning", path, line, "is not to be edited: graded with the original") for path, line in edited
    ]
    return findings + _together("layout", harmless, "differ in layout or comments alone, harmless")


def _added_findings(added: list[str]) -> list[Finding]:
    return _together("added", added, "stand where only the original files count, and are left out")


def _kept_findings(
    own: Mapping[str, bytes], editable: pathspec.GitIgnoreSpec, original: Mapping[str, bytes]
) -> list[Finding]:
    """Say what was edited outside the task: kept, for it may have been needed, but somebody should look at it."""
    findings, harmless = [], []
    for path in sorted(own):
        if path not in original or own[path] == original[path]:
            continue
        line = first_difference(path, own[path], original[path])
        if line is None:
            harmless.append(path)
        elif not editable.match_file(path):
            findings.append(Finding("edit", "info", path, line, "is edited outside the task; graded as it is"))
    return findings + _together("layout", harmless, "differ in layout or comments alone, harmless")


def _together(kind: str, paths: list[str], message: str) -> list[Finding]:
    """Return one finding for many files: a formatter goes over the whole tree."""
    if not paths:
        return []
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return [Finding(kind, "info", "", None, f"{message}: {', '.join(paths[:_SHOWN])}{more}")]


def _lfs_finding(path: str) -> Finding:
    return Finding("lfs", "warning", path, None, "is a pointer to Git LFS, whose content is not fetched")


def _spec(patterns: tuple[str, ...]) -> pathspec.GitIgnoreSpec:
    return pathspec.GitIgnoreSpec.from_lines(patterns)
