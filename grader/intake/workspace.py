"""The files that are graded: what the student handed in, with tests and given files put back as they were."""

import os
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grader.assignment.manifest import Manifest, Policy
from grader.errors import UsageError
from grader.intake.export import Exported, export, is_usable, patterns
from grader.intake.findings import Finding, shown, together
from grader.intake.objects import blob_id
from grader.intake.repository import Mirror
from grader.intake.tokens import Change, compare

__all__ = ["Finding", "Workspace", "detect", "originals", "overlay", "prepare", "read_tree"]

_SKIPPED_FOLDERS = frozenset({".git", ".venv", "venv", "__pycache__", "node_modules", "build"})
_MOST_TREE_FILES = 20_000


@dataclass(frozen=True, slots=True)
class Workspace:
    """What is graded.

    Attributes:
        files: Contents by path; every path can be written below a folder.
        findings: What a person should see.
        student_files: Which of the files are the student's own version.
    """

    files: Mapping[str, bytes]
    findings: tuple[Finding, ...]
    student_files: frozenset[str]


def detect(paths: Collection[str], manifests: Mapping[str, Manifest]) -> tuple[str, ...]:
    """Return the ids of the assignments whose files are all in a tree."""
    present = frozenset(paths)
    return tuple(name for name, manifest in manifests.items() if present.issuperset(manifest.detect.files))


def originals(manifest: Manifest, mirror: Mirror, commit: str) -> dict[str, bytes]:
    """Return the original files that a manifest exports, but for those that the origin's server lacks.

    Raises:
        SourceError: The commit cannot be read.
        InfrastructureError: Its files cannot be fetched.
    """
    takes = patterns(manifest.policy.export)
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
    known = {blob_id(content): content for content in (*(original or {}).values(), *given.values())}
    exported = export(manifest.policy, mirror, commit, known)
    made = overlay(manifest, exported.files, original, given)
    findings = (*exported.findings, *_unread_edits(exported, original or {}), *made.findings)
    return Workspace(made.files, findings, made.student_files)


def read_tree(folder: Path, max_file_bytes: int = 4 << 20) -> dict[str, bytes]:
    """Return the files of a working tree by path, for a person's own check; build and tool folders are left out.

    Raises:
        UsageError: A file cannot be read, or the folder holds too many.
    """
    found: dict[str, bytes] = {}
    try:
        for path in _walk(folder):
            if path.stat().st_size <= max_file_bytes:
                found[path.relative_to(folder).as_posix()] = path.read_bytes()
            if len(found) > _MOST_TREE_FILES:
                raise UsageError(
                    f"{folder} holds more than {_MOST_TREE_FILES} files", "go to the top of your repository"
                )
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error}", "give the folder that holds your work") from error
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        paths = (Path(parent, name) for name in sorted(files))
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def overlay(
    manifest: Manifest, files: Mapping[str, bytes], original: Mapping[str, bytes] | None, given: Mapping[str, bytes]
) -> Workspace:
    """Put tests and given files back as they were, and say what was edited elsewhere.

    What a manifest neither overlays nor gives stays as the student has it: some had to change a header or the build
    file for their compiler. Such an edit is reported and costs nothing.
    """
    covers = patterns(manifest.policy.overlay)
    replaced = {path: content for path, content in (original or {}).items() if covers.match_file(path)} | dict(given)
    taken = _exported(manifest.policy, files)
    own = {
        path: content
        for path, content in taken.items()
        if path not in replaced and not (original is not None and covers.match_file(path))
    }
    clashing = _clashing(_by_trust(manifest.policy, own, original or {}), replaced)
    kept = {path: content for path, content in own.items() if path not in clashing}
    findings = [
        *_replaced_edits(taken, replaced),
        *_kept_edits(manifest.policy, kept, original),
        *together(
            "added",
            "info",
            sorted(taken.keys() - replaced.keys() - own.keys()),
            "left out: only the original files count there",
        ),
        *together("name", "warning", clashing, "left out: the name differs from another's by case alone"),
        *_missing(manifest.policy, files, replaced, original or {}),
    ]
    return Workspace({**kept, **replaced}, tuple(findings), frozenset(kept))


def _exported(policy: Policy, files: Mapping[str, bytes]) -> dict[str, bytes]:
    takes = patterns(policy.export)
    return {path: content for path, content in files.items() if takes.match_file(path) and is_usable(path)}


def _by_trust(policy: Policy, own: Collection[str], original: Collection[str]) -> list[str]:
    """Return the student's paths, those that the assignment knows first: of two that clash, these stay."""
    editable = patterns(policy.editable)
    return sorted(own, key=lambda path: (path not in original, not editable.match_file(path), path))


def _clashing(own: Sequence[str], replaced: Collection[str]) -> list[str]:
    """Return those of the student's paths that a file system could take for an earlier path, or for its folder.

    On a system that ignores case, `Test/x` would land on `test/x`; and `test` cannot be a file where `test/x` is one.
    """
    owner: dict[str, str] = {}
    clashing = []
    for path in (*sorted(replaced), *own):
        parts = path.split("/")
        claims = ["".join(f"{part}/" for part in parts[:depth]) for depth in range(1, len(parts))] + [path]
        keys = [unicodedata.normalize("NFC", claim.rstrip("/")).casefold() for claim in claims]
        if path not in replaced and any(
            owner.get(key, claim) != claim for key, claim in zip(keys, claims, strict=True)
        ):
            clashing.append(path)
        else:
            owner.update(zip(keys, claims, strict=True))
    return clashing


def _replaced_edits(files: Mapping[str, bytes], replaced: Mapping[str, bytes]) -> list[Finding]:
    """Say which of the files that were put back the student had changed."""
    edits = {path: compare(path, replaced[path], files[path]) for path in sorted(replaced) if path in files}
    message = "is not to be edited: graded with the original"
    return [
        *(
            Finding("edit", "warning", shown(path), edit.line, message)
            for path, edit in edits.items()
            if edit.change is Change.REAL
        ),
        *_layout([path for path, edit in edits.items() if edit.change is Change.HARMLESS]),
    ]


def _kept_edits(policy: Policy, own: Mapping[str, bytes], original: Mapping[str, bytes] | None) -> list[Finding]:
    """Say what was edited or added outside the task: kept, for it may have been needed, but for a person to see."""
    if original is None:
        return []
    editable = patterns(policy.editable)
    edits = {path: compare(path, original[path], own[path]) for path in sorted(own) if path in original}
    added = [path for path in sorted(own) if path not in original and not editable.match_file(path)]
    return [
        *(
            Finding("edit", "info", shown(path), edit.line, "is edited outside the task; graded as it is")
            for path, edit in edits.items()
            if edit.change is Change.REAL and not editable.match_file(path)
        ),
        *_layout([path for path, edit in edits.items() if edit.change is Change.HARMLESS]),
        *together("added", "info", added, "new, outside the task; graded as it is"),
    ]


def _layout(paths: list[str]) -> list[Finding]:
    return together("layout", "info", paths, "differs from the original in layout or comments alone, harmless")


def _missing(
    policy: Policy, files: Mapping[str, bytes], replaced: Mapping[str, bytes], original: Mapping[str, bytes]
) -> list[Finding]:
    takes = patterns(policy.export)
    gone = sorted(path for path in original if path not in files and takes.match_file(path))
    back = [path for path in gone if path in replaced]
    return [
        *together("missing", "warning", back, "is missing: graded with the original"),
        *together("missing", "info", [path for path in gone if path not in replaced], "is missing"),
    ]


def _unread_edits(exported: Exported, original: Mapping[str, bytes]) -> list[Finding]:
    """Say which original files were changed into what is not read, a link or something large: by git's names."""
    changed = [
        path
        for path, object_id in sorted(exported.object_ids.items())
        if path in original and path not in exported.files and object_id != blob_id(original[path])
    ]
    return together("edit", "warning", changed, "is not to be edited: graded with the original")
