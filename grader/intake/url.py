"""What people paste, and what it says: a repository, a commit, and whether that can be graded.

Nothing is fetched here. The repository of an accepted link is put together anew from parts that were each checked,
so that nothing else of what was pasted ever reaches git.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

from grader.errors import UsageError

DEFAULT_HOSTS: Collection[str] = ("github.com", "gitee.com", "gitlab.com")
MIN_COMMIT_DIGITS = 4  # git itself refuses to look up fewer
MAX_LINK_CHARACTERS = 2048

_FLAT_HOSTS = frozenset({"github.com", "gitee.com"})  # a repository there is always owner/name, never a subgroup's
_COMMIT = re.compile(r"[0-9a-fA-F]{4,40}")
_HEX = re.compile(r"[0-9a-fA-F]+")
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,127}")
_HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]*[a-z0-9](?::[0-9]{1,5})?")
_SCHEME = re.compile(r"(?:git\+)?(?:https?|git)://", re.IGNORECASE)
_SSH = re.compile(r"(?:ssh://git@(?P<host>[^/@]+)/|git@(?P<scp_host>[^/:@]+):(?!//))(?P<path>.+)", re.IGNORECASE)
_AT_REF = re.compile(r"(?P<path>.*)@(?P<ref>[^/@]+)", re.DOTALL)
_FULL_WIDTH = "（）【】《》「」『』〈〉〔〕，。、；：！？“”‘’"
_AROUND = _FULL_WIDTH + " \t\r\n\u00a0\u3000\u200b\u200c\u200d\u2060\ufeff<>()[]{}\"'`,;"
_REF_PAGES = frozenset({"tree", "commit", "commits", "blob", "raw", "blame", "edit", "src"})


class Verdict(StrEnum):
    """What can be done with a link."""

    OK = "ok"
    NEEDS_COMMIT = "needs_commit"  # a branch moves on; only a commit can be graded
    TOO_SHORT = "too_short"
    LOCAL_ONLY = "local_only"  # a repository on this machine: graded only where the caller allows it
    REFUSED = "refused"
    REFUSED_HOST = "refused_host"


@dataclass(frozen=True, slots=True)
class Link:
    """A link that was read.

    Attributes:
        repository: Where git finds it, `https://host/path` or `file:///path`; empty where the link is refused.
        ref: The commit in lower case, or the branch as it was given; empty where there is none.
        verdict: Whether it can be graded.
    """

    repository: str
    ref: str
    verdict: Verdict


_REFUSED = Link("", "", Verdict.REFUSED)
_REFUSED_HOST = Link("", "", Verdict.REFUSED_HOST)


def parse(text: str, *, hosts: Collection[str] = DEFAULT_HOSTS) -> Link:
    """Read a link as people paste it: any page of a repository, a clone address, with brackets and spaces around.

    Never raises; whatever cannot be read is refused.

    Args:
        text: What was pasted.
        hosts: Hosts from which a link may come, in lower case (`host` or `host:port`).
    """
    if len(text) > MAX_LINK_CHARACTERS:
        return _REFUSED
    text = _without_surroundings(text)
    if not text or any(character.isspace() or not character.isprintable() for character in text):
        return _REFUSED
    if text.lower().startswith("file://"):
        return _parse_file(text[len("file://") :])
    ssh = _SSH.fullmatch(text)
    if ssh is not None:
        return _parse_web(ssh["host"] or ssh["scp_host"], ssh["path"], hosts)
    scheme = _SCHEME.match(text)
    host, _, path = text[scheme.end() if scheme else 0 :].partition("/")
    return _parse_web(host, path, hosts)


def require_commit(link: Link, *, allow_local: bool) -> None:
    """Do nothing where the link names a commit that may be graded.

    Raises:
        UsageError: Anything else, with what to hand in instead.
    """
    if link.verdict is Verdict.OK or (link.verdict is Verdict.LOCAL_ONLY and allow_local and _is_commit(link.ref)):
        return
    what, advice = _REASONS[link.verdict]
    example = commit_link(link.repository or "https://github.com/<you>/TinyInfiniTrain", "<commit>")
    if link.verdict is Verdict.LOCAL_ONLY and allow_local:
        what, advice = _REASONS[Verdict.NEEDS_COMMIT]
    raise UsageError(what.format(ref=link.ref), advice.format(example=example))


def commit_link(repository: str, commit: str) -> str:
    """Return the link that hands in exactly this commit of a repository."""
    if repository.startswith("file://"):
        return f"{repository}@{commit}"
    _, _, rest = repository.partition("://")
    host, _, _ = rest.partition("/")
    return f"{repository}/{'tree' if host in _FLAT_HOSTS else '-/tree'}/{commit}"


_REASONS = {
    Verdict.NEEDS_COMMIT: (
        "the link names no commit but {ref!r}, which may move on",
        "hand in {example}; `git rev-parse HEAD` prints the commit, once it is pushed",
    ),
    Verdict.TOO_SHORT: (
        f"the commit {{ref!r}} has fewer than {MIN_COMMIT_DIGITS} digits",
        "hand in more of its digits: {example}; `git rev-parse HEAD` prints all 40",
    ),
    Verdict.LOCAL_ONLY: (
        "the link names a repository on this machine, which is graded only by an explicit local run",
        "hand in a link like {example}, or add --runner local for your own code",
    ),
    Verdict.REFUSED: (
        "this is no link to a repository's commit that can be used",
        "hand in a link like {example}, without a password or token in it",
    ),
    Verdict.REFUSED_HOST: (
        "the link's host is not among those from which submissions may come",
        "hand in a link like {example}; staff can allow more hosts by GRADER_HOSTS",
    ),
}


def _without_surroundings(text: str) -> str:
    """Cut what a page or a message left around a link, and what follows a full-width mark in it.

    The course's own page swallows a full-width bracket into the link, plain or percent-encoded.
    """
    text = text.strip(_AROUND)
    for mark in _FULL_WIDTH:
        text = text.partition(mark)[0]
    # A page may have encoded the mark. UTF-8 never shows a character's bytes inside another character's.
    marks = "|".join("".join(f"%{byte:02X}" for byte in mark.encode()) for mark in _FULL_WIDTH)
    return re.split(marks, text, maxsplit=1, flags=re.IGNORECASE)[0].rstrip(_AROUND + ".!?")


def _parse_file(path: str) -> Link:
    path, ref = _split_at_ref(path)
    decoded = unquote(path)
    if not path.startswith("/") or ".." in decoded.split("/") or not decoded.isprintable() or "@" in path:
        return _REFUSED
    return Link(f"file://{path}", ref.lower() if _is_commit(ref) else ref, Verdict.LOCAL_ONLY)


def _parse_web(host: str, path: str, hosts: Collection[str]) -> Link:
    host = host.lower()
    host = host if host in hosts else host.removeprefix("www.")
    if not _HOST.fullmatch(host):
        return _REFUSED
    if host not in hosts:
        return _REFUSED_HOST
    path = re.split(r"[?#]", path, maxsplit=1)[0].rstrip("/")
    segments = [unquote(segment) for segment in path.split("/")]
    if not all(map(_is_safe_segment, segments)):
        return _REFUSED
    names, page = _split_page(host, segments)
    last, ref = _split_at_ref(names[-1]) if names else ("", "")
    names = [*names[:-1], last.removesuffix(".git")]
    if not _names_a_repository(host, names):
        return _REFUSED
    return _judged(f"https://{host}/{'/'.join(names)}", [ref, *page] if ref else _ref_of_page(page))


def _split_at_ref(text: str) -> tuple[str, str]:
    """Split `repository@ref`; without an `@` the ref is empty."""
    found = _AT_REF.fullmatch(text)
    return (found["path"], found["ref"]) if found else (text, "")


def _is_safe_segment(segment: str) -> bool:
    return segment not in ("", ".", "..") and segment.isprintable() and "\\" not in segment


def _split_page(host: str, segments: list[str]) -> tuple[list[str], list[str]]:
    """Split a path into the repository's names and the page of it that the link shows."""
    if host in _FLAT_HOSTS:
        return segments[:2], segments[2:]
    if "-" in segments:
        where = segments.index("-")
        return segments[:where], segments[where + 1 :]
    where = next((i for i, name in enumerate(segments) if i >= 2 and name in _REF_PAGES), len(segments))
    return segments[:where], segments[where:]


def _names_a_repository(host: str, names: list[str]) -> bool:
    fits = len(names) == 2 if host in _FLAT_HOSTS else len(names) >= 2
    return fits and all(_NAME.fullmatch(name) and name != ".git" for name in names)


def _ref_of_page(page: list[str]) -> list[str]:
    """Return the segments of the ref that a page shows, none where it shows none."""
    if len(page) >= 2 and page[0] in _REF_PAGES:
        return page[1:]
    if len(page) >= 4 and page[0] in ("pull", "pulls", "merge_requests") and page[2] == "commits":
        return page[3:]
    if len(page) == 2 and page[0] == "archive":
        return [re.sub(r"\.(zip|tar\.gz)$", "", page[1])]
    return []


def _judged(repository: str, ref: list[str]) -> Link:
    if ref and _is_commit(ref[0]):
        return Link(repository, ref[0].lower(), Verdict.OK)  # a file's path may follow
    if len(ref) == 1 and _HEX.fullmatch(ref[0]) and len(ref[0]) < MIN_COMMIT_DIGITS:
        return Link(repository, ref[0].lower(), Verdict.TOO_SHORT)
    return Link(repository, "/".join(ref), Verdict.NEEDS_COMMIT)


def _is_commit(ref: str) -> bool:
    return _COMMIT.fullmatch(ref) is not None
