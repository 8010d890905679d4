from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.assignment.manifest import Detect, ItemSpec, Manifest, Policy, Text
from grader.errors import UsageError
from grader.intake import workspace
from grader.intake.repository import Mirrors
from grader.intake.workspace import Workspace
from tests.fixtures.git_repositories import Repository, Tree, symlink

NAME = Text(en="x", zh="x")
MANIFEST = Manifest(
    id="trial",
    version="1",
    title=NAME,
    track="cpp",
    detect=Detect(files=("CMakeLists.txt", "src/task.cc")),
    policy=Policy(
        export=("/CMakeLists.txt", "/src/**", "/test/**"), editable=("/src/task.cc",), overlay=("/test/**", "/data/**")
    ),
    items=(ItemSpec(id="item", title=NAME, points=1),),
)
ORIGINAL = {
    "CMakeLists.txt": b"project(x)\n",
    "src/task.cc": b"// TODO\nint f();\n",
    "src/lib.h": b"int g(); // helps\n",
    "test/a.cc": b"EXPECT_NEAR(f(), 1, 0.001); // strict\n",
}


def _overlay(files: Mapping[str, bytes], original: Mapping[str, bytes] | None = ORIGINAL) -> Workspace:
    return workspace.overlay(MANIFEST, ORIGINAL | files, original, {})


def _found(made: Workspace) -> list[tuple[str, str, str, int | None]]:
    return [(each.kind, each.severity, each.path, each.line) for each in made.findings]


def test_the_task_alone_is_edited_without_a_word() -> None:
    made = _overlay({"src/task.cc": b"int f() { return 1; }\n"})
    assert made.files == ORIGINAL | {"src/task.cc": b"int f() { return 1; }\n"}
    assert made.findings == ()
    assert made.student_files == {"CMakeLists.txt", "src/task.cc", "src/lib.h"}


def test_an_edited_test_is_put_back_and_flagged_with_its_line() -> None:
    made = _overlay({"test/a.cc": b"// loose\nEXPECT_NEAR(f(), 1, 0.05);\n"})
    assert made.files["test/a.cc"] == ORIGINAL["test/a.cc"]
    assert _found(made) == [("edit", "warning", "test/a.cc", 2)]


def test_an_edited_header_is_kept_and_reported() -> None:
    made = _overlay({"src/lib.h": b"\nlong g();\n"})
    assert made.files["src/lib.h"] == b"\nlong g();\n"
    assert _found(made) == [("edit", "info", "src/lib.h", 2)]


def test_layout_and_comments_are_harmless() -> None:
    made = _overlay(
        {
            "test/a.cc": b"EXPECT_NEAR(f( ), 1,\r\n    0.001);\r\n",
            "src/lib.h": b"int g();",
            "CMakeLists.txt": b"project(x)",
        }
    )
    assert {(kind, severity) for kind, severity, _, _ in _found(made)} == {("layout", "info")}
    assert made.files["test/a.cc"] == ORIGINAL["test/a.cc"]


def test_a_reformatted_tree_takes_one_line() -> None:
    original = ORIGINAL | {f"src/{number}.h": b"int a;" for number in range(30)}
    made = workspace.overlay(MANIFEST, {path: b"\n" + data for path, data in original.items()}, original, {})
    assert len(made.findings) == 2  # of the tests, and of all else
    assert "32 files" in made.findings[1].message or "33 files" in made.findings[1].message


def test_files_added_among_the_tests_are_left_out_and_others_kept() -> None:
    made = _overlay({"test/mine.cc": b"", "src/new.h": b"", "notes.txt": b""})
    assert "test/mine.cc" not in made.files
    assert "notes.txt" not in made.files
    assert made.files["src/new.h"] == b""
    assert sorted(_found(made)) == [("added", "info", "src/new.h", None), ("added", "info", "test/mine.cc", None)]


def test_a_deleted_test_is_put_back() -> None:
    files = {path: data for path, data in ORIGINAL.items() if path not in ("test/a.cc", "src/lib.h")}
    made = workspace.overlay(MANIFEST, files, ORIGINAL, {})
    assert made.files["test/a.cc"] == ORIGINAL["test/a.cc"]
    assert "src/lib.h" not in made.files
    assert _found(made) == [("missing", "warning", "test/a.cc", None), ("missing", "info", "src/lib.h", None)]


def test_without_originals_the_students_files_stand() -> None:
    made = _overlay({"test/a.cc": b"mine"}, original=None)
    assert made.files["test/a.cc"] == b"mine"
    assert made.student_files == made.files.keys()
    assert made.findings == ()


def test_given_files_replace_the_students() -> None:
    files = ORIGINAL | {"src/lib.h": b"mine"}
    made = workspace.overlay(MANIFEST, files, None, {"src/lib.h": b"given", "src/more.h": b"given"})
    assert made.files["src/lib.h"] == made.files["src/more.h"] == b"given"
    assert "src/lib.h" not in made.student_files
    assert _found(made) == [("edit", "warning", "src/lib.h", 1)]


@pytest.mark.parametrize(
    "clashing",
    ["src/Lib.h", "SRC/lib.h/x", "src/lib.h/x", "src/LIB.H/x", "src/task.cc/x/y", "test"],
)
def test_a_name_that_could_land_on_another_file_is_left_out(clashing: str) -> None:
    policy = MANIFEST.policy.model_copy(update={"export": ("**",)})
    manifest = MANIFEST.model_copy(update={"policy": policy})
    made = workspace.overlay(manifest, ORIGINAL | {clashing: b"evil"}, ORIGINAL, {})
    assert clashing not in made.files
    assert made.files.keys() == ORIGINAL.keys()
    if clashing != "test":  # which is a name among the tests: left out as any other is there
        assert ("name", "warning", clashing, None) in _found(made)


def test_of_two_spellings_the_composed_and_the_decomposed_clash() -> None:
    made = _overlay({"src/\u00e9.h": b"", "src/e\u0301.h": b""})
    assert len(made.files) == len(ORIGINAL) + 1


NAMES = st.lists(
    st.sampled_from(["a", "A", "src", "Src", "test", "TEST", "lib.h", "LIB.h", "x"]), min_size=1, max_size=4
)


@given(st.sets(NAMES.map("/".join)), st.sets(NAMES.map("/".join)))
def test_every_workspace_can_be_written_where_case_is_ignored(paths: set[str], given_paths: set[str]) -> None:
    given_files = {path: b"" for path in given_paths if path.islower() and path.startswith("test/")}
    given_files = {p: b"" for p in given_files if not any(q.startswith(f"{p}/") for q in given_files)}
    policy = MANIFEST.policy.model_copy(update={"export": ("**",)})
    manifest = MANIFEST.model_copy(update={"policy": policy})
    files = workspace.overlay(manifest, dict.fromkeys(paths, b"x"), None, given_files).files
    folded = {path.casefold() for path in files}
    assert len(folded) == len(files)
    assert not any(other.startswith(f"{path}/") for path in folded for other in folded)
    spelled = {("/".join(path.split("/")[:depth])) for path in files for depth in range(1, path.count("/") + 1)}
    assert len({folder.casefold() for folder in spelled}) == len(spelled)
    assert given_files.keys() <= files.keys()


def _prepare(tmp_path: Path, tree: Tree) -> Workspace:
    server = Repository.create(tmp_path / "server.git")
    commit = server.commit(tree, "work")
    mirror = Mirrors(tmp_path / "cache").open(server.url)
    mirror.update()
    return workspace.prepare(MANIFEST, mirror, commit, ORIGINAL, {})


def test_a_commit_is_prepared_end_to_end(tmp_path: Path) -> None:
    made = _prepare(tmp_path, ORIGINAL | {"src/task.cc": "int f() { return 1; }", "record.json": "{}", "src/a\nb": ""})
    assert made.files == ORIGINAL | {"src/task.cc": b"int f() { return 1; }"}
    assert {finding.kind for finding in made.findings} == {"name", "result_file"}


def test_a_test_turned_into_a_link_is_put_back_and_flagged(tmp_path: Path) -> None:
    made = _prepare(tmp_path, ORIGINAL | {"test/a.cc": symlink("/etc/passwd")})
    assert made.files["test/a.cc"] == ORIGINAL["test/a.cc"]
    assert ("edit", "warning", "test/a.cc", None) in _found(made)


def test_originals_are_what_the_policy_exports(tmp_path: Path) -> None:
    server = Repository.create(tmp_path / "server.git")
    commit = server.commit(ORIGINAL | {"README.md": "", "data/big.bin": b"x"}, "base")
    mirror = Mirrors(tmp_path / "cache").open(server.url)
    mirror.update()
    assert workspace.originals(MANIFEST, mirror, commit) == ORIGINAL


def test_assignments_are_detected_by_their_files() -> None:
    manifests = {"trial": MANIFEST}
    assert workspace.detect(list(ORIGINAL), manifests) == ("trial",)
    assert workspace.detect(["CMakeLists.txt"], manifests) == ()


def test_a_working_tree_is_read_without_tools_and_links(tmp_path: Path) -> None:
    for name in ("src/a.cc", ".git/config", "build/x", "src/__pycache__/y", "large"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * (20 if name == "large" else 1))
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert workspace.read_tree(tmp_path, max_file_bytes=10) == {"src/a.cc": b"x"}


def test_a_working_tree_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        workspace.read_tree(tmp_path / "nowhere")
