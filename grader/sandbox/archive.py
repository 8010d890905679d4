"""Files in and out of a container, as tar archives that hold nothing but plain files and folders."""

import io
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from grader.errors import SandboxError


def pack(files: Mapping[str, bytes], *, executable: Collection[str], read_only: bool) -> bytes:
    """Return a tar archive with folders before their files, owned by whoever unpacks it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder in _folders(files):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), file_mode(name, executable, read_only)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def file_mode(name: str, executable: Collection[str], read_only: bool) -> int:
    """Return the permissions of a file that is put into a sandbox."""
    return (0o444 if read_only else 0o644) | (0o111 if name in executable else 0)


def _folders(files: Mapping[str, bytes]) -> Iterator[str]:
    seen: set[str] = set()
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise SandboxError(f"path {name!r} leads out of the sandbox")
        for parent in reversed(path.parents):
            if str(parent) not in seen and str(parent) != ".":
                seen.add(str(parent))
                yield str(parent)


def unpack(archive: bytes, max_bytes: int, max_files: int) -> dict[str, bytes]:
    """Return the regular files of an archive that student code may have filled.

    Raises:
        SandboxError: It is no archive, or holds more than it may.
    """
    found: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for entry in opened:
                if not entry.isfile():
                    continue
                total += entry.size
                if total > max_bytes or len(found) >= max_files:
                    raise SandboxError(f"more than {max_files} files or {max_bytes} bytes came out of the sandbox")
                content = opened.extractfile(entry)
                assert content is not None
                found[entry.name.removeprefix("./")] = content.read()
    except tarfile.TarError as error:
        raise SandboxError(f"what came out of the sandbox is no archive: {error}") from error
    return found
