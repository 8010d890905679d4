import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grader.errors import UsageError
from grader.intake.url import DEFAULT_HOSTS, Link, Verdict, commit_link, parse, require_commit

TABLE = Path(__file__).parents[2] / "fixtures" / "submission_urls.tsv"
ROWS = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
SAFE_WEB = re.compile(r"https://(github\.com|gitee\.com|gitlab\.com)(/[A-Za-z0-9_.][A-Za-z0-9_.-]*){2,}")


@pytest.mark.parametrize(("pasted", "repository", "ref", "verdict"), ROWS, ids=[row[0] for row in ROWS])
def test_every_row_of_the_table_gives_its_columns(pasted: str, repository: str, ref: str, verdict: str) -> None:
    assert parse(pasted) == Link(repository, ref, Verdict(verdict))


@pytest.mark.parametrize(
    ("pasted", "repository", "ref"),
    [
        ("[mine](https://github.com/u/R/tree/28d8951)", "", ""),
        ("<https://github.com/u/R/tree/28d8951>。", "https://github.com/u/R", "28d8951"),
        ("https://github.com/u/R/tree/28d8951。谢谢", "https://github.com/u/R", "28d8951"),
        ("https://github.com/u/R/tree/28d8951.", "https://github.com/u/R", "28d8951"),
        ("\ufeffhttps://github.com/u/R/commit/28d8951\u200b", "https://github.com/u/R", "28d8951"),
        ("https://github.com/u/R/blob/28d8951/docs/%E6%8A%A5%E5%91%8A.md", "https://github.com/u/R", "28d8951"),
        ("https://github.com/u/R/blob/28d8951/a@b", "https://github.com/u/R", "28d8951"),
        ("ssh://git@github.com/u/R.git@28d8951", "https://github.com/u/R", "28d8951"),
        ("git+https://github.com/u/R.git@28d8951", "https://github.com/u/R", "28d8951"),
        ("http://github.com/u/R/tree/28d8951", "https://github.com/u/R", "28d8951"),
        ("https://github.com/u/R/archive/28d8951.zip", "https://github.com/u/R", "28d8951"),
        ("https://gitlab.com/g/R/tree/28d8951", "https://gitlab.com/g/R", "28d8951"),
        ("https://gitlab.com/g/s/R/-/commit/28d8951", "https://gitlab.com/g/s/R", "28d8951"),
    ],
)
def test_pages_and_surroundings_do_not_matter(pasted: str, repository: str, ref: str) -> None:
    verdict = Verdict.OK if repository else Verdict.REFUSED
    assert parse(pasted) == Link(repository, ref, verdict)


@pytest.mark.parametrize(
    ("pasted", "ref"),
    [
        ("https://github.com/u/R/pull/3", ""),
        ("https://github.com/u/R/tree/feature%2Fx", "feature/x"),
        ("https://github.com/u/R.git@feature/x", "feature/x"),
        ("https://github.com/u/R/tree/fe/login", "fe/login"),
        ("https://github.com/u/R/tree/" + "a" * 41, "a" * 41),
    ],
)
def test_what_moves_on_needs_a_commit(pasted: str, ref: str) -> None:
    assert parse(pasted) == Link("https://github.com/u/R", ref, Verdict.NEEDS_COMMIT)


@pytest.mark.parametrize(
    "pasted",
    [
        "",
        "https://[::1]/u/R/tree/28d8951",
        "https://2130706433/u/R/tree/28d8951",
        "https://localhost/u/R/tree/28d8951",
        "https://g\u0456thub.com/u/R/tree/28d8951",
        "https://github.com:token@evil.example/u/R",
        "https://token@github.com/u/R/tree/28d8951",
        "https://github.com/u%2F../R/tree/28d8951",
        "https://github.com/u/%2e%2e/tree/28d8951",
        "https://github.com/u/R%0a/tree/28d8951",
        "https://github.com/u/R%00/tree/28d8951",
        "https://github.com/u",
        "https://github.com/u/.git/tree/28d8951",
        "file:///srv/../etc@28d8951",
        "file:///srv/a%0ab@28d8951",
        "file://host/srv@28d8951",
        "--upload-pack=x",
        "fd::17",
        "https://github.com/u/R/tree/28d8951" + "0" * 3000,
    ],
)
def test_what_no_repository_needs_is_refused(pasted: str) -> None:
    assert parse(pasted) == Link("", "", Verdict.REFUSED)


def test_hosts_come_from_the_settings() -> None:
    hosts = ("git.school.example:3000",)
    accepted = parse("https://git.school.example:3000/u/R/tree/28d8951", hosts=hosts)
    assert accepted == Link("https://git.school.example:3000/u/R", "28d8951", Verdict.OK)
    assert parse("https://github.com/u/R/tree/28d8951", hosts=hosts).verdict is Verdict.REFUSED_HOST
    assert parse("https://git.school.example/u/R/tree/28d8951", hosts=hosts).verdict is Verdict.REFUSED_HOST


PIECES = st.sampled_from(
    [
        "https://",
        "http://",
        "git@",
        "ssh://git@",
        "file://",
        "github.com",
        "gitlab.com",
        "www.",
        "/",
        ":",
        "@",
        "..",
        ".",
        "-",
        "%2F",
        "%00",
        "%EF%BC%89",
        "）",
        "（",
        "tree",
        "commit",
        "blob",
        "/-/",
        ".git",
        "28d8951",
        "28D",
        "main",
        "u",
        "R",
        "?",
        "#",
        "\\",
        "user:token@",
        "\n",
        "ext::",
        "[",
        "]",
        "-x",
    ]
)
PASTED = st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join))


@given(PASTED)
@example("https://github.com/u/TinyInfiniTrain/tree/28d8951")
@example("https://[")
def test_an_accepted_link_is_a_safe_address_and_a_commit(pasted: str) -> None:
    link = parse(pasted)
    if link.verdict is Verdict.OK:
        assert re.fullmatch(r"[0-9a-f]{4,40}", link.ref)
    if link.verdict in (Verdict.OK, Verdict.NEEDS_COMMIT, Verdict.TOO_SHORT):
        assert SAFE_WEB.fullmatch(link.repository)
        assert not {"..", ".", ".git"} & set(link.repository.split("/"))
    if link.verdict in (Verdict.REFUSED, Verdict.REFUSED_HOST):
        assert link.repository == link.ref == ""


@given(
    st.sampled_from(sorted(DEFAULT_HOSTS)),
    st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True),
    st.from_regex(r"[0-9a-f]{4,40}", fullmatch=True),
)
def test_the_link_that_is_advised_is_accepted(host: str, name: str, commit: str) -> None:
    repository = f"https://{host}/{name}/{name}"
    assert parse(commit_link(repository, commit)) == Link(repository, commit, Verdict.OK)


def test_a_local_repository_needs_leave_and_a_commit() -> None:
    link = parse("file:///srv/git/my%20work@28D8951")
    assert link == Link("file:///srv/git/my%20work", "28d8951", Verdict.LOCAL_ONLY)
    require_commit(link, allow_local=True)
    with pytest.raises(UsageError, match="explicit local run"):
        require_commit(link, allow_local=False)
    with pytest.raises(UsageError, match="no commit"):
        require_commit(parse("file:///srv/git/work"), allow_local=True)


@pytest.mark.parametrize(
    ("pasted", "what", "advice"),
    [
        ("https://github.com/u/R/tree/main", "'main'", "https://github.com/u/R/tree/<commit>"),
        ("https://gitlab.com/g/s/R", "no commit", "https://gitlab.com/g/s/R/-/tree/<commit>"),
        ("https://github.com/u/R/tree/28d", "fewer than 4", "https://github.com/u/R/tree/<commit>"),
        ("hello", "no link", "github.com/<you>"),
        ("https://evil.example/u/R/tree/28d8951", "host", "GRADER_HOSTS"),
    ],
)
def test_a_refusal_says_what_to_hand_in_instead(pasted: str, what: str, advice: str) -> None:
    with pytest.raises(UsageError) as refusal:
        require_commit(parse(pasted), allow_local=False)
    assert what in refusal.value.what
    assert advice in refusal.value.advice
    assert refusal.value.exit_code == 2
