"""Where gradings are kept: the cache of earlier results, and the folder that a grading leaves behind.

Both are written whole into a temporary folder beside their place and then renamed, so that no reader ever meets
half a record.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import filelock
from pydantic import ValidationError

from grader.errors import InfrastructureError
from grader.record import Artifact, Record, RecordStatus


@dataclass(frozen=True, slots=True)
class Grading:
    """A record and the files that belong to it, by path relative to the record's folder."""

    record: Record
    files: Mapping[str, bytes] = field(default_factory=dict)


def artifacts(files: Mapping[str, bytes]) -> tuple[Artifact, ...]:
    """Describe files for a record."""
    return tuple(
        Artifact(name=Path(path).stem, path=path, sha256=hashlib.sha256(content).hexdigest())
        for path, content in sorted(files.items())
    )


def digest_of(parts: Iterable[str]) -> str:
    """Return a hexadecimal digest of a sequence of strings; no two sequences run together."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def digest_of_folder(folder: Path, pattern: str = "**/*") -> str:
    """Return a digest of the names and contents of all matching files below a folder."""
    files = sorted(path for path in folder.glob(pattern) if path.is_file() and "__pycache__" not in path.parts)
    return digest_of(
        part
        for path in files
        for part in (path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
    )


def read_record(path: Path) -> Record:
    """Read a `record.json`.

    Raises:
        InfrastructureError: It is missing or is no record of this schema.
    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InfrastructureError(f"{path} is no readable record: {error}", "grade the commit again") from error


class ResultCache:
    """Gradings by key. A key names everything that the result depends on."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, key: str) -> Grading | None:
        """Return an earlier grading, or None; a damaged entry is removed and counts as none."""
        folder = self._root / key
        if not folder.is_dir():
            return None
        try:
            record = read_record(folder / "record.json")
            files = {artifact.path: (folder / artifact.path).read_bytes() for artifact in record.artifacts}
        except (InfrastructureError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            return None
        if artifacts(files) != record.artifacts:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return Grading(record, files)

    def put(self, key: str, grading: Grading) -> None:
        """Keep a grading. An infrastructure error is never kept."""
        if grading.record.status is RecordStatus.INFRA_ERROR:
            return
        write_folder(self._root / key, {**grading.files, "record.json": record_bytes(grading.record)})


def record_bytes(record: Record) -> bytes:
    """Return `record.json`'s bytes."""
    return (record.model_dump_json(indent=2) + "\n").encode()


def keep_earlier_result(folder: Path, record: Record) -> bool:
    """Say whether `folder` holds a result that an infrastructure error must not replace."""
    if record.status is not RecordStatus.INFRA_ERROR or not (folder / "record.json").is_file():
        return False
    try:
        return read_record(folder / "record.json").status is not RecordStatus.INFRA_ERROR
    except InfrastructureError:
        return False


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder in one step; what was there before is replaced.

    Raises:
        InfrastructureError: The disk is full or the place is not writable.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for name, content in files.items():
                path = staged / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            staged.chmod(0o755)
            _replace(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise InfrastructureError(f"{folder} cannot be written: {error}", "free some disk space and retry") from error


def _replace(staged: Path, folder: Path) -> None:
    """Move `staged` to `folder`. A folder cannot be renamed over a full one, so the old one steps aside first."""
    with filelock.FileLock(folder.parent / ".writing.lock"):
        aside = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        if folder.exists():
            folder.rename(aside)
        staged.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
