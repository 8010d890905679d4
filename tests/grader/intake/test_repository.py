import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import filelock
import psutil
import pytest

from grader.errors import GraderError, InfrastructureError, SourceError
from grader.intake.objects import blob_id
from grader.intake.repository import Kind, Mirror, Mirrors
from tests.fixtures.git_repositories import FIRST_COMMIT_AT, Repository, gitlink, symlink
from tests.grader.intake.servers import ADDRESS, answering, lead, silent

TREE = {"a.cc": "int a;\n", "docs/报告 1.md": "报告\n", "large.bin": b"\0" * 5000}


@pytest.fixture
def server(tmp_path: Path) -> Repository:
    return Repository.create(tmp_path / "server.git")


@pytest.fixture
def mirrors(tmp_path: Path) -> Mirrors:
    return Mirrors(tmp_path / "cache", timeout_s=60.0)


def _mirror(mirrors: Mirrors, server: Repository) -> Mirror:
    mirror = mirrors.open(server.url)
    mirror.update()
    return mirror


def _git_dir(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "cache").glob("*.git")
    return found


def _local_blobs(mirror: Mirror, commit: str) -> set[str]:
    return {entry.path for entry in mirror.listing(commit) if entry.size is not None}


def test_contents_come_only_when_they_are_read(server: Repository, mirrors: Mirrors) -> None:
    commit = server.commit(TREE, "work")
    mirror = _mirror(mirrors, server)
    assert _local_blobs(mirror, commit) == set()
    assert mirror.read(commit, ["a.cc", "docs/报告 1.md", "not there"]) == {
        "a.cc": b"int a;\n",
        "docs/报告 1.md": "报告\n".encode(),
    }
    assert _local_blobs(mirror, commit) == {"a.cc", "docs/报告 1.md"}


def test_needed_contents_come_in_one_batch(
    server: Repository, mirrors: Mirrors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = server.commit({f"{number}.cc": f"int a{number};\n" for number in range(50)}, "work")
    mirror = _mirror(mirrors, server)
    log = tmp_path / "fetches"
    hook = tmp_path / "hook"
    hook.write_text(f'#!/bin/sh\necho fetch >> "{log}"\nexec "$@"\n')
    hook.chmod(0o755)
    configuration = tmp_path / "gitconfig"
    configuration.write_text(f"[uploadpack]\n\tpackObjectsHook = {hook}\n")  # git asks the user's configuration alone
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(configuration))
    assert len(mirror.read(commit, [f"{number}.cc" for number in range(50)])) == 50
    assert log.read_text().splitlines() == ["fetch"]


def test_what_is_new_is_fetched_and_what_is_gone_is_forgotten(server: Repository, mirrors: Mirrors) -> None:
    first = server.commit(TREE, "first")
    server.commit(TREE, "aside", ref="refs/heads/aside")
    mirror = _mirror(mirrors, server)
    second = server.commit(TREE | {"b.cc": ""}, "second", parents=[first])
    server.git("update-ref", "-d", "refs/heads/aside")
    server.commit(TREE, "below", ref="refs/heads/aside/below")
    mirror.update()
    assert mirror.resolve(second) == second
    assert {branch.name for branch in mirror.branches()} == {"main", "aside/below"}


def test_short_and_upper_case_commits_are_completed(server: Repository, mirrors: Mirrors) -> None:
    commit = server.commit(TREE, "work")
    mirror = _mirror(mirrors, server)
    assert mirror.resolve(commit[:4]) == mirror.resolve(commit[:7].upper()) == commit
    assert mirror.has(commit)
    assert not mirror.has("0" * 40)
    assert not mirror.has(blob_id(b"int a;\n"))


@pytest.mark.parametrize("ref", ["refs/tags/v1", "refs/pull/7/head", "refs/merge-requests/2/head"])
def test_tags_and_pull_requests_count(server: Repository, mirrors: Mirrors, ref: str) -> None:
    server.commit(TREE, "work")
    commit = server.commit({"a.cc": "int b;\n"}, "more", ref=ref)
    assert _mirror(mirrors, server).resolve(commit[:10]) == commit


def test_a_commit_that_nothing_leads_to_is_refused(server: Repository, mirrors: Mirrors) -> None:
    server.commit(TREE, "work")
    hidden = server.commit({"a.cc": "int b;\n"}, "of another fork", ref="refs/forks/other")
    with pytest.raises(SourceError, match="on no branch, tag or pull request") as refusal:
        _mirror(mirrors, server).resolve(hidden)
    assert "another fork" in refusal.value.advice


def test_a_rewritten_commit_is_refused_but_a_pinned_one_stays_readable(
    server: Repository, mirrors: Mirrors, tmp_path: Path
) -> None:
    old = server.commit(TREE, "old")
    mirror = _mirror(mirrors, server)
    assert mirror.read(old, ["a.cc"])
    mirror.pin(old)
    server.commit({"a.cc": ""}, "rewritten")
    mirror.update()
    with pytest.raises(SourceError, match=r"leads to commit .* any more"):
        mirror.resolve(old)
    assert mirror.read(old, ["a.cc"]) == {"a.cc": b"int a;\n"}
    assert (_git_dir(tmp_path) / "refs" / "grader" / old).is_file()


def test_an_ambiguous_commit_lists_the_candidates(server: Repository, mirrors: Mirrors) -> None:
    commits: list[str] = []
    while len({commit[:1] for commit in commits}) == len(commits):
        commits.append(server.commit(TREE, f"work {len(commits)}", parents=commits[-1:]))
    (shared,) = [c for c in {c[0] for c in commits} if sum(each.startswith(c) for each in commits) > 1]
    with pytest.raises(SourceError, match="beginning of 2 commits") as refusal:
        _mirror(mirrors, server).resolve(shared)
    assert {c[:12] for c in commits if c.startswith(shared)} <= set(refusal.value.what.replace(",", "").split())


def test_a_branch_that_looks_like_a_commit_is_named_as_a_branch(server: Repository, mirrors: Mirrors) -> None:
    commit = server.commit(TREE, "work", ref="refs/heads/deadbeef")
    with pytest.raises(SourceError, match="is a branch") as refusal:
        _mirror(mirrors, server).resolve("deadbeef")
    assert commit in refusal.value.advice


def test_branches_come_newest_first_with_their_dates(server: Repository, mirrors: Mirrors) -> None:
    starter = server.commit({"a.cc": ""}, "starter")
    work = server.commit(TREE, "work", ref="refs/heads/homework", parents=[starter])
    mirror = _mirror(mirrors, server)
    assert [(branch.name, branch.commit) for branch in mirror.branches()] == [("homework", work), ("main", starter)]
    assert mirror.branches()[1].date == datetime.fromtimestamp(FIRST_COMMIT_AT, UTC)
    assert mirror.default_branch() == "main"


def test_an_empty_repository_has_nothing_to_grade(server: Repository, mirrors: Mirrors) -> None:
    mirror = _mirror(mirrors, server)
    assert mirror.branches() == ()
    with pytest.raises(SourceError):
        mirror.resolve("28d8951")


def test_the_listing_tells_files_links_and_submodules_apart(server: Repository, mirrors: Mirrors) -> None:
    commit = server.commit({"a": "x", "l": symlink("a"), "third_party/x": gitlink("1" * 40)}, "work")
    mirror = _mirror(mirrors, server)
    assert {entry.path: entry.kind for entry in mirror.listing(commit)} == {
        "a": Kind.FILE,
        "l": Kind.SYMLINK,
        "third_party/x": Kind.SUBMODULE,
    }
    assert mirror.read(commit, ["a", "l", "third_party/x"]) == {"a": b"x", "l": b"a"}


# Servers that are not as one would wish


def test_a_blob_that_the_server_lacks_costs_nobody_else_anything(server: Repository, mirrors: Mirrors) -> None:
    commit = server.commit(TREE, "work")
    _lose(server, blob_id(b"\0" * 5000))
    mirror = _mirror(mirrors, server)
    assert mirror.read(commit, ["a.cc", "docs/报告 1.md"]).keys() == {"a.cc", "docs/报告 1.md"}
    assert mirror.read(commit, ["a.cc", "large.bin"]).keys() == {"a.cc"}


def _lose(server: Repository, object_id: str) -> None:
    server.git("repack", "-a", "-d", "-q")
    packs = list((server.path / "objects" / "pack").glob("*.pack"))
    contents = [pack.read_bytes() for pack in packs]
    for path in (server.path / "objects" / "pack").glob("*"):
        path.unlink()
    for content in contents:
        server.git("unpack-objects", "-q", given=content)
    server.object_file(object_id).unlink()


@pytest.mark.parametrize("version", ["0", "2"])
def test_a_server_without_filters_or_single_objects_works(
    server: Repository, mirrors: Mirrors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    server.git("config", "uploadpack.allowFilter", "false")
    server.git("config", "uploadpack.allowAnySHA1InWant", "false")
    lead(monkeypatch, tmp_path, server.url, f"[protocol]\n\tversion = {version}\n")
    commit = server.commit(TREE, "work")
    mirror = mirrors.open(ADDRESS)
    mirror.update()
    assert mirror.read(commit, ["a.cc"]) == {"a.cc": b"int a;\n"}


def test_a_server_that_hands_out_no_single_object_is_fetched_whole(
    server: Repository, mirrors: Mirrors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.git("config", "uploadpack.allowAnySHA1InWant", "false")
    lead(monkeypatch, tmp_path, server.url, "[protocol]\n\tversion = 0\n")
    commit = server.commit(TREE, "work")
    mirror = mirrors.open(ADDRESS)
    mirror.update()
    assert _local_blobs(mirror, commit) == set()
    assert mirror.read(commit, ["a.cc"]) == {"a.cc": b"int a;\n"}


def test_a_missing_repository_is_the_links_fault(mirrors: Mirrors, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="missing or denied") as refusal:
        mirrors.open((tmp_path / "nowhere").as_uri()).update()
    assert refusal.value.exit_code == 3


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, SourceError),
        (403, SourceError),
        (404, SourceError),
        (429, InfrastructureError),
        (503, InfrastructureError),
    ],
)
def test_an_answer_that_denies_is_kept_apart_from_one_that_fails(
    mirrors: Mirrors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, error: type[GraderError]
) -> None:
    with answering(status) as address:
        lead(monkeypatch, tmp_path, address)
        with pytest.raises(error):
            mirrors.open(ADDRESS).update()
    assert not list((tmp_path / "cache").glob("*.git*"))


def test_a_network_that_is_down_is_nobodys_fault(
    mirrors: Mirrors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead(monkeypatch, tmp_path, "http://127.0.0.1:1/work")
    with pytest.raises(InfrastructureError, match="could not be reached"):
        mirrors.open(ADDRESS).update()


def test_a_server_that_never_answers_is_given_up_and_nothing_is_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silent() as address:
        lead(monkeypatch, tmp_path, address)
        with pytest.raises(InfrastructureError, match=r"took longer than 1 s"):
            Mirrors(tmp_path / "cache", timeout_s=1.0).open(ADDRESS).update()
        time.sleep(0.2)
        running = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        assert not [line for line in running if address in line]


def test_a_repository_that_is_too_large_is_refused(server: Repository, tmp_path: Path) -> None:
    noise = b"".join(blob_id(b"%d" % number).encode() for number in range(20_000))
    server.commit({"noise": noise}, "work")
    server.git("config", "uploadpack.allowFilter", "false")
    with pytest.raises(SourceError, match="larger than"):
        Mirrors(tmp_path / "cache", max_pack_bytes=64 << 10).open(server.url).update()


# A cache that several use, or that broke


def _grade(arguments: tuple[Path, str, str]) -> dict[str, bytes]:
    cache, url, ref = arguments
    mirror = Mirrors(cache, timeout_s=60.0).open(url)
    mirror.update()
    commit = mirror.resolve(ref)
    mirror.pin(commit)
    return mirror.read(commit, ["a.cc", "large.bin"])


def _four_at_once(jobs: Sequence[tuple[Path, str, str]]) -> list[dict[str, bytes]]:
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_grade, jobs))


def test_four_processes_share_one_cache(server: Repository, tmp_path: Path) -> None:
    commits = [server.commit(TREE | {"a.cc": f"int a{n};\n"}, "work", ref=f"refs/heads/{n}") for n in range(4)]
    jobs = [(tmp_path / "cache", server.url, commit[:12]) for commit in commits]
    for _ in range(2):
        results = _four_at_once(jobs)
        assert [result["a.cc"] for result in results] == [f"int a{n};\n".encode() for n in range(4)]
        assert all(result["large.bin"] == b"\0" * 5000 for result in results)
    assert not list((tmp_path / "cache").glob("*.part"))


def test_who_waits_too_long_for_another_fetch_is_told(server: Repository, tmp_path: Path) -> None:
    server.commit(TREE, "work")
    _mirror(Mirrors(tmp_path / "cache"), server)
    (lock,) = (tmp_path / "cache").glob("*.lock")
    with filelock.FileLock(lock), pytest.raises(InfrastructureError, match="another grading"):
        Mirrors(tmp_path / "cache", timeout_s=0.2).open(server.url).update()


@pytest.mark.parametrize("damage", ["cut_pack", "no_packs", "no_head", "left_lock", "empty"])
def test_a_broken_mirror_is_made_anew(server: Repository, mirrors: Mirrors, tmp_path: Path, damage: str) -> None:
    first = server.commit(TREE, "first")
    mirror = _mirror(mirrors, server)
    mirror.read(first, ["a.cc"])
    mirror.pin(first)
    second = server.commit(TREE | {"b.cc": "int b;\n"}, "second", parents=[first])
    _break(_git_dir(tmp_path), damage)
    mirror.update()
    assert mirror.resolve(second) == second
    assert mirror.read(second, ["a.cc", "b.cc"]) == {"a.cc": b"int a;\n", "b.cc": b"int b;\n"}


def _break(git_dir: Path, damage: str) -> None:
    packs = list((git_dir / "objects" / "pack").glob("*.pack"))
    if damage == "cut_pack":
        for pack in packs:
            pack.chmod(0o644)
            pack.write_bytes(pack.read_bytes()[:40])
    elif damage == "no_packs":
        for pack in packs:
            pack.unlink()
    elif damage == "no_head":
        (git_dir / "HEAD").unlink()
    elif damage == "left_lock":
        (git_dir / "refs" / "heads" / "main.lock").touch()
    else:
        for path in sorted(git_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def test_a_mirror_that_breaks_between_two_reads_is_made_anew(
    server: Repository, mirrors: Mirrors, tmp_path: Path
) -> None:
    commit = server.commit(TREE, "work")
    mirror = _mirror(mirrors, server)
    mirror.read(commit, ["a.cc"])
    mirror.pin(commit)
    _break(_git_dir(tmp_path), "cut_pack")
    assert mirror.read(commit, ["a.cc"]) == {"a.cc": b"int a;\n"}
    assert mirror.resolve(commit[:8]) == commit
    assert (_git_dir(tmp_path) / "refs" / "grader" / commit).is_file()


def test_a_damaged_content_is_noticed_and_fetched_again(server: Repository, mirrors: Mirrors, tmp_path: Path) -> None:
    commit = server.commit(TREE, "work")
    mirror = _mirror(mirrors, server)
    forged = Repository(_git_dir(tmp_path))
    other = forged.git("hash-object", "-w", "--stdin", given=b"int z;\n")
    right = blob_id(b"int a;\n")
    forged.object_file(right).parent.mkdir(exist_ok=True)
    forged.object_file(other).rename(forged.object_file(right))
    assert mirror.read(commit, ["a.cc"]) == {"a.cc": b"int a;\n"}


# Trees that are written to hurt


def test_a_tree_that_unfolds_without_end_is_refused(server: Repository, mirrors: Mirrors) -> None:
    below = server.git("hash-object", "-w", "--stdin", given=b"x")
    kind, mode = "blob", "100644"
    for _ in range(9):
        rows = "".join(f"{mode} {kind} {below}\t{'n' * 20}{number}\n" for number in range(8))
        below, kind, mode = server.git("mktree", given=rows.encode()), "tree", "040000"
    commit = server.git("-c", "user.name=x", "-c", "user.email=x@example.org", "commit-tree", below, "-m", "bomb")
    server.git("update-ref", "refs/heads/main", commit)
    with pytest.raises(SourceError, match="too many files"):
        _mirror(mirrors, server).listing(commit)


def test_caps_hold_for_what_is_read(server: Repository, mirrors: Mirrors) -> None:
    commit = server.commit(TREE, "work")
    mirror = _mirror(mirrors, server)
    assert mirror.read(commit, TREE, max_file_bytes=4999).keys() == TREE.keys() - {"large.bin"}
    assert mirror.read(commit, TREE, max_file_bytes=5000).keys() == TREE.keys()
    with pytest.raises(SourceError, match="the cap is 5000"):
        mirror.read(commit, TREE, max_total_bytes=5000)
