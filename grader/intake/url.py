"""What a pasted link says: which repository, which commit, or why it cannot be used. Nothing is fetched."""

import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote, urlsplit

from grader.errors import UsageError

DEFAULT_HOSTS = ("github.com", "gitee.com", "gitlab.com")
MIN_DIGITS = 4
_LONGEST = 2_000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_COMMIT = re.compile(r"[0-9a-fA-F]{1,40}")
_SCP = re.compile(r"git@(?P<host>[A-Za-z0-9.-]+):(?P<path>[^\s:]+)")
_BARE = re.compile(r"[A-Za-z0-9.-]+\.[A-Za-z]{2,}/\S+")
_ENCODED_END = re.compile(r"(?:%[0-9A-Fa-f]{2})+$")
# What people and pages leave around a link; the full-width bracket is swallowed by the course's own page.
_AROUND = " \t\r\n<>()[]{}\"'`,;，。；、！？（）【】《》「」“”‘’：\u3000\ufeff\u200b"


class Verdict(StrEnum):
    """What can be done with a link."""

    OK = "ok"
    NEEDS_COMMIT = "needs_commit"
    TOO_SHORT = "too_short"
    LOCAL_ONLY = "local_only"
    REFUSED = "refused"
    REFUSED_HOST = "refused_host"


@dataclass(frozen=True, slots=True)
class Link:
    """A link, taken apart. `repository` and `ref` are empty where it is refused."""

    repository: str
    ref: str
    verdict: Verdict


_REFUSED = Link("", "", Verdict.REFUSED)


def parse(text: str, *, hosts: Collection[str] = DEFAULT_HOSTS) -> Link:
    """Take a link apart. Never raises: what cannot be used has a verdict that says so.

    Args:
        text: What somebody pasted.
        hosts: Names of hosts from which a repository may come.
    """
    cleaned = _clean(text)
    if not cleaned or len(cleaned) > _LONGEST or any(unicodedata.category(c).startswith("C") for c in cleaned):
        return _REFUSED
    if cleaned.startswith("file:///"):
        return _local(cleaned)
    split = _host_and_path(cleaned)
    if split is None:
        return _REFUSED
    host, path = split
    found = _repository_and_ref(path)
    if host not in {each.lower() for each in hosts}:
        return Link("", "", Verdict.REFUSED_HOST if found and _is_a_host_name(host) else Verdict.REFUSED)
    if found is None:
        return _REFUSED
    names, ref = found
    return _judged(f"https://{host}/{'/'.join(names)}", ref)


def require_commit(link: Link, *, allow_local: bool) -> None:
    """Return where a link names a commit that may be graded.

    Raises:
        UsageError: It does not, with what to hand in instead.
    """
    example = f"{link.repository or 'https://github.com/<owner>/<repository>'}/tree/<commit>"
    if link.verdict is Verdict.OK or (link.verdict is Verdict.LOCAL_ONLY and allow_local):
        return
    reasons = {
        Verdict.NEEDS_COMMIT: (f"the link names no commit (it says {link.ref!r})", f"hand in {example}"),
        Verdict.TOO_SHORT: (
            f"{link.ref!r} has {len(link.ref)} digits, a commit needs at least {MIN_DIGITS}",
            f"hand in {example} with more digits",
        ),
        Verdict.LOCAL_ONLY: (
            "a repository on this machine is graded by the local runner alone",
            "add --runner local, if you trust the code",
        ),
        Verdict.REFUSED: ("this is no link to a commit", f"hand in {example}"),
        Verdict.REFUSED_HOST: (
            "the link's host is not one from which submissions are taken",
            "hand in a link of an allowed host; staff may allow more with GRADER_HOSTS",
        ),
    }
    raise UsageError(*reasons[link.verdict])


def _clean(text: str) -> str:
    """Strip what stands around a link, also where a browser has percent-encoded it."""
    cleaned = text.strip(_AROUND)
    while (found := _ENCODED_END.search(cleaned)) and not unquote(found.group()).strip(_AROUND):
        cleaned = cleaned[: found.start()].strip(_AROUND)
    return cleaned


def _host_and_path(text: str) -> tuple[str, str] | None:
    scp = _SCP.fullmatch(text)
    if scp:
        return scp["host"].lower().removeprefix("www."), scp["path"]
    if "://" not in text:
        if not _BARE.fullmatch(text):
            return None
        text = f"https://{text}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    if parts.scheme not in {"https", "http"} or parts.username or parts.password or port not in {None, 443, 80}:
        return None
    return host.lower().removeprefix("www."), unquote(parts.path)


def _repository_and_ref(path: str) -> tuple[list[str], str] | None:
    """Split `/owner/name/tree/ref`, `/owner/name.git@ref` and their kin into the names and the ref."""
    path, _, after_at = path.partition("@")
    words = [word for word in path.split("/") if word]
    marks = {"tree", "commit", "commits", "blob", "pull", "-"}
    place = next((i for i, word in enumerate(words) if i >= 2 and word in marks), len(words))
    names, rest = words[:place], words[place:]
    if len(names) < 2 or (len(names) > 2 and rest[:1] != ["-"]):
        return None
    names[-1] = names[-1].removesuffix(".git")
    if not all(_NAME.fullmatch(name) for name in names) or (after_at and rest):
        return None
    ref = after_at.strip("/") or _ref(rest)
    return (names, ref) if not re.search(r"(?:^|/)\.\.(?:/|$)|^-", ref) else None


def _ref(words: list[str]) -> str:
    """Return what stands after `tree`, `commit`, `blob` or `pull/N/commits`."""
    if words[:1] == ["-"]:
        words = words[1:]
    if len(words) >= 4 and words[0] == "pull" and words[2] in {"commits", "commit", "changes"}:
        return words[3]
    if len(words) >= 2 and words[0] in {"blob", "commit", "commits"}:
        return words[1]
    if len(words) >= 2 and words[0] == "tree":
        # A branch's name may hold slashes; a commit followed by a folder's path does not matter.
        return words[1] if _COMMIT.fullmatch(words[1]) else "/".join(words[1:])
    return ""


def _judged(repository: str, ref: str) -> Link:
    if not _COMMIT.fullmatch(ref):
        return Link(repository, ref, Verdict.NEEDS_COMMIT)
    verdict = Verdict.OK if len(ref) >= MIN_DIGITS else Verdict.TOO_SHORT
    return Link(repository, ref.lower(), verdict)


def _local(text: str) -> Link:
    path, at, ref = text.rpartition("@")
    if not at or not _COMMIT.fullmatch(ref) or ".." in path.split("/"):
        return _REFUSED
    verdict = Verdict.LOCAL_ONLY if len(ref) >= MIN_DIGITS else Verdict.TOO_SHORT
    return Link(path, ref.lower(), verdict)


def _is_a_host_name(host: str) -> bool:
    """Names only: an address (of a cloud's metadata service, say) is no host of repositories."""
    return bool(re.fullmatch(r"(?:[a-z0-9-]+\.)+[a-z]{2,}", host))
