"""Fetching into a mirror: commits and trees first, the contents that are needed later, in one batch."""

import re
from collections.abc import Collection

from grader.intake import objects
from grader.intake.git_command import Git, GitError

REMOTE = "source"
_REFSPECS = (
    "+refs/heads/*:refs/heads/*",
    "+refs/tags/*:refs/tags/*",
    "+refs/pull/*/head:refs/pull/*/head",
    "+refs/merge-requests/*/head:refs/merge-requests/*/head",
)
# Given for each fetch, never written into the mirror's configuration: then what is missing stays missing when the
# mirror is read, where git would otherwise go and fetch it, one connection a file.
_PROMISOR = (f"remote.{REMOTE}.promisor=true",)
_PARTIAL = (*_PROMISOR, f"remote.{REMOTE}.partialclonefilter=blob:none")
_WITHOUT_CONTENTS = "--filter=blob:none"
_FETCH = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--no-recurse-submodules")
_NOT_THERE = re.compile(r"not our ref ([0-9a-f]{40})")
_MAX_ABSENT = 16  # contents that a server names as missing, one a try


def make(git: Git, repository: str) -> None:
    """Make an empty mirror of a repository, and fetch into it."""
    git("init", "--quiet", "--bare", "--template=", "--object-format=sha1", str(git.git_dir))
    git("config", f"remote.{REMOTE}.url", repository)
    fetch_commits(git)


def fetch_commits(git: Git) -> None:
    """Fetch branches, tags and pull requests, without contents where the server can; forget those that are gone."""
    for half_written in git.git_dir.glob("objects/pack/tmp_*"):
        half_written.unlink(missing_ok=True)
    arguments = (*_FETCH, "--prune")
    try:
        git(*arguments, _WITHOUT_CONTENTS, REMOTE, *_REFSPECS, options=_PARTIAL)
    except GitError:  # a server may announce filters and fail at them
        git(*arguments, "--no-filter", REMOTE, *_REFSPECS, options=_PROMISOR)


def fetch_contents(git: Git, object_ids: Collection[str]) -> None:
    """Fetch those blobs that are missing, in one batch; what the server itself lacks is given up."""
    missing = set(object_ids) - set(objects.sizes(git, object_ids))
    for _ in range(_MAX_ABSENT):
        if not missing:
            return
        try:
            _fetch_objects(git, missing)
        except GitError as error:
            absent = _NOT_THERE.search(error.what)
            if absent is None or absent[1] not in missing:
                break
            missing.remove(absent[1])
        else:
            return
    _fetch_all_again(git)


def _fetch_objects(git: Git, object_ids: Collection[str]) -> None:
    options = (*_PARTIAL, "fetch.negotiationAlgorithm=noop")
    git(*_FETCH, _WITHOUT_CONTENTS, "--stdin", REMOTE, options=options, stdin=objects.lines(object_ids))


def _fetch_all_again(git: Git) -> None:
    """Fetch contents and all: the way with a server that hands out no single object."""
    try:
        git(*_FETCH, "--refetch", "--no-filter", REMOTE, *_REFSPECS, options=_PROMISOR)
    except GitError:  # the server lacks some of it; whatever was to be read is then reported as absent
        return
