"""Runs git, in one place: with the user's own configuration, and nothing of the repository that is looked at.

Plain `subprocess` and not GitPython's `execute`: that hands every inherited `GIT_*` variable on, and `GIT_DIR` or
`GIT_OBJECT_DIRECTORY` of whoever called us must not decide where a student's commit is read from.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from grader.errors import InfrastructureError, SourceError

# What a user may have set for reaching repositories. GIT_CONFIG_GLOBAL also reaches the far side of a file:// fetch.
_KEPT_GIT_VARIABLES = frozenset(
    {"GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH"}
    | {"GIT_SSH", "GIT_SSH_COMMAND", "GIT_ASKPASS", "GIT_PROXY_SSL_CAINFO", "GIT_EXEC_PATH"}
)
# The mirror has no hooks and no attributes of its own; these keep a user's global ones away from it.
_SAFE_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.fsmonitor=false",
    "protocol.ext.allow=never",
    "gc.auto=0",
    "maintenance.auto=false",
    "fetch.recurseSubmodules=false",
    "transfer.fsckObjects=false",
)
_SOURCE_FAULTS = re.compile(
    r"not found|does not exist|does not appear to be a git repository|could not read (?:Username|Password)"
    r"|authentication failed|permission denied|access denied|returned error: 40[134]|terminal prompts disabled",
    re.IGNORECASE,
)


class GitError(InfrastructureError):
    """A git command failed. `stderr` is what it said."""

    def __init__(self, what: str, stderr: str, advice: str = "") -> None:
        super().__init__(what, advice)
        self.stderr = stderr


def environment() -> dict[str, str]:
    """Return the environment that git runs in: nothing asks, nothing is localised, no inherited repository."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT_GIT_VARIABLES
    }
    return {**kept, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}


def run(git_dir: Path, arguments: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> bytes:
    """Run one git command on a bare repository and return its standard output.

    Raises:
        GitError: It failed.
        InfrastructureError: It took longer than `timeout_s`, or git is missing.
    """
    settings = [part for setting in _SAFE_SETTINGS for part in ("-c", setting)]
    argv = ["git", f"--git-dir={git_dir}", *settings, *arguments]
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, timeout=timeout_s, env=environment(), check=False, cwd="/"
        )
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(
            f"git {_verb(arguments)} took longer than {timeout_s:g} s", "try again later, or raise GRADER_GIT_TIMEOUT_S"
        ) from error
    except OSError as error:
        raise InfrastructureError(f"git cannot be started: {error}", "install git") from error
    if done.returncode:
        stderr = redact(done.stderr.decode("utf-8", "replace").strip())
        raise GitError(f"git {_verb(arguments)} failed: {stderr[-500:]}", stderr, "try again; see that the host is up")
    return done.stdout


def source_fault(error: GitError, repository: str) -> SourceError | None:
    """Return the error as the student's, where what git said means that the repository cannot be had by anybody."""
    if not _SOURCE_FAULTS.search(error.stderr):
        return None
    return SourceError(
        f"{repository} cannot be read: it does not exist, or is private",
        "check the link; a private repository must be readable for the grader",
    )


def redact(text: str) -> str:
    """Return text without user names and passwords in links."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", text)


def _verb(arguments: Sequence[str]) -> str:
    """Return which git command it is, past the settings before it."""
    return next(word for last, word in zip(["", *arguments], arguments, strict=False) if word != "-c" and last != "-c")
