from collections.abc import Mapping
from pathlib import Path

import pytest

from grader.assignment.manifest import Policy
from grader.errors import SourceError
from grader.intake.export import Exported, export, is_usable
from grader.intake.objects import blob_id
from grader.intake.repository import Mirrors
from tests.fixtures.git_repositories import Repository, Tree, gitlink, symlink

POLICY = Policy(export=("/src/**", "/main.cc"), editable=("/main.cc",), max_files=20, max_file_bytes=100)
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


@pytest.fixture
def server(tmp_path: Path) -> Repository:
    return Repository.create(tmp_path / "server.git")


def _export(
    server: Repository, tree: Tree, policy: Policy = POLICY, known: Mapping[str, bytes] | None = None
) -> Exported:
    return _export_commit(server, server.commit(tree, "work"), policy, known)


def _export_commit(
    server: Repository, commit: str, policy: Policy = POLICY, known: Mapping[str, bytes] | None = None
) -> Exported:
    mirror = Mirrors(server.path.parent / "cache").open(server.url)
    mirror.update()
    return export(policy, mirror, mirror.resolve(commit), known or {})


def _kinds(exported: Exported) -> set[tuple[str, str]]:
    return {(finding.kind, finding.path) for finding in exported.findings}


def test_only_what_the_policy_names_is_taken(server: Repository) -> None:
    exported = _export(
        server,
        {
            "main.cc": "m",
            "src/deep/a.h": "a",
            "src/报告.md": "r",
            "sub/main.cc": "no",
            "big.zip": b"z" * 1000,
            "src/lib": gitlink("1" * 40),
        },
    )
    assert exported.files == {"main.cc": b"m", "src/deep/a.h": b"a", "src/报告.md": b"r"}
    assert exported.findings == ()


def test_known_contents_are_not_fetched(server: Repository) -> None:
    commit = server.commit({"main.cc": "known", "src/a": "new"}, "work")
    exported = _export_commit(server, commit, known={blob_id(b"known"): b"known"})
    mirror = Mirrors(server.path.parent / "cache").open(server.url)
    assert exported.files == {"main.cc": b"known", "src/a": b"new"}
    assert {entry.path for entry in mirror.listing(commit) if entry.size is None} == {"main.cc"}


# Links


def test_links_inside_the_exported_tree_become_what_they_lead_to(server: Repository) -> None:
    exported = _export(
        server,
        {
            "main.cc": symlink("src/a.cc"),
            "src/a.cc": "a",
            "src/chain": symlink("../src/link"),
            "src/link": symlink("./a.cc"),
            "src/folder/b.h": "b",
            "src/other": symlink("folder"),
        },
    )
    assert exported.files == {
        "main.cc": b"a",
        "src/a.cc": b"a",
        "src/chain": b"a",
        "src/link": b"a",
        "src/folder/b.h": b"b",
        "src/other/b.h": b"b",
    }
    assert exported.findings == ()


@pytest.mark.parametrize(
    "target",
    [
        "/etc/passwd",
        "../../../etc/passwd",
        "..",
        ".",
        "",
        "nothing",
        "../secret.txt",
        "link",
        "../src",
        "a.cc/../../../x",
        "\udcff",
        "x" * 90,
    ],
)
def test_links_to_anything_else_are_refused(server: Repository, target: str) -> None:
    tree = {"src/a.cc": "a", "secret.txt": "not exported"}
    if target:
        exported = _export(server, tree | {"src/link": symlink_bytes(target)})
    else:
        exported = _export(server, tree | {"src/link": symlink("x" * 101)})  # larger than any file may be
    assert exported.files == {"src/a.cc": b"a"}
    assert _kinds(exported) in ({("symlink", "src/link")}, {("too_large", "src/link")})


def symlink_bytes(target: str) -> object:
    entry = symlink("")
    return type(entry)(entry.mode, target.encode("utf-8", "surrogateescape"))


def test_links_in_circles_are_refused(server: Repository) -> None:
    exported = _export(server, {"src/x": symlink("y"), "src/y": symlink("x"), "main.cc": ""})
    assert exported.files == {"main.cc": b""}
    assert exported.findings[0].message.startswith("2 files: left out")


def test_links_that_multiply_a_folder_meet_the_cap(server: Repository) -> None:
    tree = {f"src/folder/{number}": "x" for number in range(9)} | {f"src/l{n}": symlink("folder") for n in range(9)}
    with pytest.raises(SourceError, match="the cap is 20"):
        _export(server, tree)


# Caps


def test_a_file_over_its_cap_is_left_out_and_named(server: Repository) -> None:
    exported = _export(server, {"main.cc": b"x" * 100, "src/a": b"x" * 101})
    assert exported.files.keys() == {"main.cc"}
    assert _kinds(exported) == {("too_large", "src/a")}


def test_too_many_files_are_refused(server: Repository) -> None:
    assert len(_export(server, {f"src/{number}": "x" for number in range(20)}).files) == 20
    with pytest.raises(SourceError, match="holds 21 files") as refusal:
        _export(server, {f"src/{number}": "x" for number in range(21)})
    assert refusal.value.exit_code == 3


def test_files_that_are_too_large_together_are_refused(server: Repository) -> None:
    policy = POLICY.model_copy(update={"max_total_bytes": 150})
    tree = {"src/a": b"a" * 100, "src/b": b"b" * 51}
    with pytest.raises(SourceError, match="151 bytes together"):
        _export(server, tree, policy)
    with pytest.raises(SourceError, match="151 bytes together"):
        _export(server, tree, policy, known={blob_id(b"a" * 100): b"a" * 100})


def test_one_content_under_many_names_counts_each_time(server: Repository) -> None:
    policy = POLICY.model_copy(update={"max_total_bytes": 150})
    with pytest.raises(SourceError, match="200 bytes together"):
        _export(server, {"src/a": b"a" * 100, "src/b": b"a" * 100}, policy)


def test_a_content_that_the_server_lacks_is_named_and_no_error(server: Repository) -> None:
    commit = server.commit({"main.cc": "m", "src/a": "lost"}, "work")
    server.git("config", "fetch.unpackLimit", "1000")
    lost = blob_id(b"lost")
    _loose(server)
    server.object_file(lost).unlink()
    exported = _export_commit(server, commit)
    assert exported.files == {"main.cc": b"m"}
    assert _kinds(exported) == {("absent", "src/a")}


def _loose(server: Repository) -> None:
    packs = list((server.path / "objects" / "pack").glob("*.pack"))
    contents = [pack.read_bytes() for pack in packs]
    for path in (server.path / "objects" / "pack").glob("*"):
        path.unlink()
    for content in contents:
        server.git("unpack-objects", "-q", given=content)


# What is flagged


def test_committed_results_are_flagged_wherever_they_are_and_never_taken(server: Repository) -> None:
    exported = _export(server, {"main.cc": "", "record.json": "{}", "runs/x/JUnit.xml": "<x/>"})
    (finding,) = exported.findings
    assert (finding.kind, finding.severity) == ("result_file", "alert")
    assert "record.json" in finding.message
    assert "JUnit.xml" in finding.message


def test_pointers_to_lfs_are_named(server: Repository) -> None:
    policy = POLICY.model_copy(update={"max_file_bytes": 1000})
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    assert _kinds(_export(server, {"src/a": pointer, "data/b": pointer}, policy)) == {("lfs", "src/a")}


# Names


@pytest.mark.parametrize(
    "name",
    ["a\nb", "a\tb", "a\x1b[31m", "a\\b", "\udcff\udcfe", "n" * 256, "报" * 86, "\u202eab", "d/" * 600 + "x", ".GIT/x"],
)
def test_names_that_no_safe_file_can_have_are_left_out(server: Repository, name: str) -> None:
    exported = _export(server, {"main.cc": "", f"src/{name}": "x"})
    assert exported.files.keys() == {"main.cc"}
    (finding,) = exported.findings
    assert finding.kind == "name"
    assert finding.path.isprintable()
    assert len(finding.path) <= 201
    finding.path.encode()


@pytest.mark.parametrize("name", ["a b", "报告 1.md", "n" * 255, "-x", "...", "a.", "~", "é"])
def test_unusual_names_are_taken(server: Repository, name: str) -> None:
    assert f"src/{name}" in _export(server, {f"src/{name}": "x"}).files


@pytest.mark.parametrize("name", ["..", ".", ".git", "/etc"])
def test_trees_that_only_a_forger_can_make_are_handled(server: Repository, name: str) -> None:
    blob = server.git("hash-object", "-w", "--stdin", given=b"x")
    inner = _tree(server, [("100644", "x", blob)])
    outer = _tree(server, [("40000", name, inner), ("100644", "ok", blob), ("100644", "ok", blob)])
    root = _tree(server, [("40000", "src", outer)])
    commit = _commit(server, root)
    exported = _export_commit(server, commit)
    assert exported.files == {"src/ok": b"x"}
    assert {finding.kind for finding in exported.findings} <= {"name"}


def _tree(server: Repository, rows: list[tuple[str, str, str]]) -> str:
    content = b"".join(f"{mode} {name}\0".encode() + bytes.fromhex(object_id) for mode, name, object_id in rows)
    return server.git("hash-object", "-t", "tree", "-w", "--literally", "--stdin", given=content)


def _commit(server: Repository, tree: str) -> str:
    text = f"tree {tree}\nauthor x <x@example.org> 0 +0000\ncommitter x <x@example.org> 0 +0000\n\nwork\n"
    commit = server.git("hash-object", "-t", "commit", "-w", "--stdin", given=text.encode())
    server.git("update-ref", "refs/heads/main", commit)
    return commit


def test_a_tree_that_names_no_tree_is_refused(server: Repository) -> None:
    blob = server.git("hash-object", "-w", "--stdin", given=b"x")
    with pytest.raises(SourceError):
        _export_commit(server, _commit(server, _tree(server, [("40000", "src", blob)])))


def test_usable_paths_stay_below_their_folder() -> None:
    assert is_usable("src/a.cc")
    for path in ("", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".git/config", "a/.Git/b", "a\0b"):
        assert not is_usable(path)
