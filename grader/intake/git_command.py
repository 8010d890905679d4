"""The git binary, run so that only the user's own configuration has a say.

What comes from a student is data here: no work tree is ever made, so no hook, filter, attribute or configuration of
their repository can run. The user's configuration (`url.<base>.insteadOf`, proxies, credential helpers) stays in force.
"""

import io
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from grader.errors import GraderError, InfrastructureError, SourceError
from grader.intake.redaction import redact

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

# Variables of git that are the user's configuration; any other (GIT_DIR and its like) would send git elsewhere.
_KEPT = re.compile(
    r"GIT_(CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|(KEY|VALUE)_\d+)|SSL_\w+|SSH(_COMMAND|_VARIANT)?"
    r"|ASKPASS|EXEC_PATH|PROXY_SSL_\w+|HTTP_\w+)"
)
_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file",  # never ext:: and its like, whatever an address is rewritten to
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
}
_OPTIONS = (
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "gc.autoDetach=false",
    "maintenance.autoDetach=false",
    "fetch.recurseSubmodules=false",
    "submodule.recurse=false",
    "advice.detachedHead=false",
)
# Variables cannot be taken away, nor limits be set, through GitPython: a fixed script does both and becomes git.
_SCRIPT = 'unset SSH_ASKPASS $1; ulimit -f "$2" 2>/dev/null; shift 2; exec git "$@"'
_BLOCK_BYTES = 512  # what `ulimit -f` counts in (POSIX)
_NOT_INSTALLED = 127
_KILLED = -9

_SOURCE_SIGNS = re.compile(
    r"repository (?:'[^']*' )?not found|not found: did you run|returned error: 40[1345]|returned error: 410"
    r"|could not read (?:Username|Password)|Authentication failed|Permission denied|access denied|HTTP Basic: Access"
    r"|does not appear to be a git repository|does not exist|dubious ownership|mismatched algorithms"
    r"|not (?:valid|found): is this a git repository|project you were looking for could not be found",
    re.IGNORECASE,
)
_NETWORK_SIGNS = re.compile(
    r"could not resolve|failed to connect|couldn't connect|connection (?:refused|reset|timed out|closed)|timed out"
    r"|network is unreachable|no route to host|returned error: (?:407|408|429|5\d\d)|RPC failed|early EOF"
    r"|hung up unexpectedly|unexpected disconnect|\bSSL\b|\bTLS\b|certificate|gnutls|proxy"
    r"|Empty reply|Host key verification failed|No space left|transport '[^']*' not allowed|unable to access",
    re.IGNORECASE,
)
_TOO_LARGE_SIGNS = re.compile(r"File too large|File size limit|signal 25|died of signal 25", re.IGNORECASE)


class GitError(InfrastructureError):
    """Git failed for a reason that is neither the link nor the network: as often as not a broken mirror."""


class OutputTooLargeError(SourceError):
    """What git was asked for is larger than anything that is graded."""


class _Capped(io.BytesIO):
    """Output that refuses to grow over its cap: a tree can be written to unfold without end."""

    def __init__(self, cap: int) -> None:
        super().__init__()
        self._left = cap

    def write(self, part: "Buffer", /) -> int:
        self._left -= memoryview(part).nbytes
        if self._left < 0:
            raise OutputTooLargeError("the commit unfolds to more than is ever graded", "hand in the work alone")
        return super().write(part)


@dataclass(frozen=True, slots=True)
class Git:
    """Git on one bare repository, which need not exist for `init`.

    Attributes:
        git_dir: The repository.
        timeout_s: Wall time after which git and all that it started is killed.
        max_file_bytes: Cap of any one file that git writes, so of a pack.
    """

    git_dir: Path
    timeout_s: float = 300.0
    max_file_bytes: int = 2 << 30

    def __call__(
        self,
        *arguments: str,
        options: Sequence[str] = (),
        stdin: bytes = b"",
        max_output_bytes: int = 256 << 20,
    ) -> bytes:
        """Run one command and return its standard output.

        Args:
            *arguments: The command and its arguments.
            options: `name=value` of git's configuration, for this run alone.
            stdin: What git reads.
            max_output_bytes: Cap of standard output.

        Raises:
            SourceError: The repository is missing, denied, or too large.
            GitError: Git failed by itself.
            InfrastructureError: Time is up, the network is down, or git is not installed.
        """
        configured = [word for option in (*_OPTIONS, *options) for word in ("-c", option)]
        command = [*_wrapper(self.max_file_bytes), f"--git-dir={self.git_dir}", *configured, *arguments]
        output = _Capped(max_output_bytes)
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            began = time.monotonic()
            status, errors = _execute(command, given, output, self.timeout_s)
        if status == 0:
            return output.getvalue()
        if status == _KILLED and time.monotonic() - began >= self.timeout_s:
            raise InfrastructureError(
                f"git {arguments[0]} took longer than {self.timeout_s:g} s and was ended",
                "try again; if the repository is that large, staff can raise GRADER_GIT_TIMEOUT_S",
            )
        raise _classified(arguments[0], status, errors)


def _wrapper(max_file_bytes: int) -> list[str]:
    foreign = [name for name in os.environ if re.fullmatch(r"GIT_[A-Z0-9_]*", name) and not _KEPT.fullmatch(name)]
    taken = [name for name in foreign if name not in _ENVIRONMENT]
    return ["/bin/sh", "-c", _SCRIPT, "sh", " ".join(taken), str(max_file_bytes // _BLOCK_BYTES)]


def _execute(command: list[str], given: BinaryIO, output: _Capped, timeout_s: float) -> tuple[int, str]:
    """Return the exit status and standard error."""
    # Imported here: GitPython refuses to be imported on a machine without git, and `doctor` is to say so kindly.
    try:
        from git.cmd import Git as Binary  # noqa: PLC0415
    except ImportError as error:
        raise _not_installed() from error
    status, _, errors = Binary("/").execute(
        command,
        given,
        with_extended_output=True,
        with_exceptions=False,
        stdout_as_string=False,
        output_stream=output,
        env=_ENVIRONMENT,
        kill_after_timeout=timeout_s,
    )
    return status, redact(_text(errors))


def _text(printed: str | bytes) -> str:
    """GitPython declares text and hands out bytes, according to how a command ends."""
    return printed.decode("utf-8", "replace") if isinstance(printed, bytes) else printed


def _classified(command: str, status: int, errors: str) -> GraderError:
    """Tell a link that is wrong from a network that is down, by what git and its transports print."""
    said = _last_words(errors)
    if status == _NOT_INSTALLED:
        return _not_installed()
    if _TOO_LARGE_SIGNS.search(errors):
        return SourceError("the repository is larger than any submission may be", "remove large files from its history")
    if _SOURCE_SIGNS.search(errors):
        return SourceError(
            f"the repository is missing or denied: {said}",
            "check the link, and that the repository is public",
        )
    if _NETWORK_SIGNS.search(errors):
        return InfrastructureError(f"the repository could not be reached: {said}", "try again later")
    return GitError(f"git {command} failed with status {status}: {said}", "try again; staff find more in the log")


def _last_words(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("fatal:", "error:", "remote:"))] or lines[-1:]
    text = "; ".join(telling[:2]) or "no message"
    return "".join(c if c.isprintable() else "?" for c in text)[:300]


def _not_installed() -> InfrastructureError:
    return InfrastructureError("git is not installed", "install it (Debian: apt-get install git)")
