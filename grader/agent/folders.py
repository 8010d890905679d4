"""The private folders of one case, and how all that foreign code has left is removed."""

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass, field

from grader.agent import privileges

_CLEAR_S = 10.0
_WRITABLE_BY_ALL = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - cleaned, not used


@dataclass(slots=True)
class Case:
    """A folder below `root` in which each child of one case makes its own. A context manager."""

    root: str
    path: str = ""
    _owners: dict[str, int | None] = field(default_factory=dict)

    def __enter__(self) -> "Case":
        """Make it; until `seal` any user may add a folder of its own."""
        self.path = tempfile.mkdtemp(prefix="case-", dir=self.root)
        os.chmod(self.path, 0o1777)  # noqa: S103 - each child adds its own folder, as its own user
        return self

    def folder(self, name: str, user: int | None) -> str:
        """Return where a child that runs as `user` is to make its own folder."""
        path = f"{self.path}/{name}"
        self._owners[path] = user
        return path

    def seal(self) -> None:
        """From now on nobody else may add or rename anything directly in it."""
        os.chmod(self.path, 0o711)  # noqa: S103 - children of other users pass through

    def __exit__(self, *_: object) -> None:
        """Remove it, and what its users have left where every user may write.

        What cannot be removed stays in the sandbox's sized space until the sandbox goes: nobody else pays for it.
        """
        pid = os.fork()
        if pid == 0:
            try:
                self._remove()
            finally:
                os._exit(0)
        privileges.wait_or_kill(pid, _CLEAR_S)
        for path in self._owners:
            with contextlib.suppress(OSError):  # empty by now, and only the owner of the case may remove it
                os.rmdir(path)
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove(self) -> None:
        for path, user in self._owners.items():
            if user is None:
                _remove_tree(path)
            else:
                with privileges.acting_as(user):
                    _remove_tree(path)
                    _remove_files_of(user)


def _remove_files_of(user: int) -> None:
    for folder in _WRITABLE_BY_ALL:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.stat(follow_symlinks=False).st_uid == user:
                    _remove_tree(entry.path)


def _remove_tree(path: str) -> None:
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(path)
