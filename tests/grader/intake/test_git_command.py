from pathlib import Path

import pytest

from grader.errors import InfrastructureError, SourceError
from grader.intake.git_command import Git, GitError, OutputTooLargeError
from grader.intake.repository import Mirrors
from tests.fixtures.git_repositories import Repository
from tests.grader.intake.servers import ADDRESS, answering, lead

SCRIPT = '#!/bin/sh\ntouch "{mark}"\nexec "$@"\n'


@pytest.fixture
def server(tmp_path: Path) -> Repository:
    repository = Repository.create(tmp_path / "server.git")
    repository.commit({"a.cc": "int a;\n", ".gitattributes": "* filter=mark diff=mark\n"}, "work")
    return repository


def _read_all(tmp_path: Path, address: str) -> dict[str, bytes]:
    mirror = Mirrors(tmp_path / "cache").open(address)
    mirror.update()
    (branch,) = mirror.branches()
    mirror.pin(branch.commit)
    return mirror.read(branch.commit, ["a.cc", ".gitattributes"])


def _program(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """Return a program that leaves a mark when it runs, and the mark."""
    mark = tmp_path / f"{name}.ran"
    program = tmp_path / name
    program.write_text(SCRIPT.format(mark=mark))
    program.chmod(0o755)
    return program, mark


def test_the_users_own_configuration_is_honoured(
    server: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead(monkeypatch, tmp_path, server.url)
    assert _read_all(tmp_path, ADDRESS)["a.cc"] == b"int a;\n"


@pytest.mark.parametrize("where", ["HOME", "XDG_CONFIG_HOME"])
def test_the_users_configuration_is_found_where_git_looks_for_it(
    server: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    lead(monkeypatch, tmp_path, server.url)
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    home = tmp_path / "home"
    target = home / ".gitconfig" if where == "HOME" else home / "git" / "config"
    target.parent.mkdir(parents=True)
    (tmp_path / "gitconfig").rename(target)
    monkeypatch.setenv(where, str(home))
    assert _read_all(tmp_path, ADDRESS)["a.cc"] == b"int a;\n"


def test_credential_helpers_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper, mark = _program(tmp_path, "helper")
    with answering(401) as address:
        lead(monkeypatch, tmp_path, address, f'[credential]\n\thelper = "{helper}"\n')
        with pytest.raises(SourceError):
            Mirrors(tmp_path / "cache").open(ADDRESS).update()
    assert mark.exists()


def test_no_variable_sends_git_to_another_repository(
    server: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Repository.create(tmp_path / "other.git")
    for name in ("GIT_DIR", "GIT_OBJECT_DIRECTORY", "GIT_WORK_TREE", "GIT_COMMON_DIR"):
        monkeypatch.setenv(name, str(other.path))
    monkeypatch.setenv("GIT_NAMESPACE", "elsewhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/dev/full")
    assert _read_all(tmp_path, server.url)["a.cc"] == b"int a;\n"
    assert not list((other.path / "objects").glob("pack/*"))


def test_neither_hooks_nor_filters_run(server: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, mark = _program(tmp_path, "reference-transaction")
    for hook in ("pre-upload", "post-update", "reference-transaction", "post-checkout"):
        target = server.path / "hooks" / hook
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(program.read_bytes())
        target.chmod(0o755)
    server.git("config", "uploadpack.packObjectsHook", str(program))
    attributes = tmp_path / "attributes"
    attributes.write_text("* filter=mark diff=mark\n")
    settings = (
        f"[core]\n\thooksPath = {tmp_path}\n\tattributesFile = {attributes}\n"
        f'[filter "mark"]\n\tsmudge = {program}\n\tclean = {program}\n\trequired = true\n'
        f'[diff "mark"]\n\ttextconv = {program}\n'
    )
    lead(monkeypatch, tmp_path, server.url, settings)
    assert _read_all(tmp_path, ADDRESS)["a.cc"] == b"int a;\n"
    assert not mark.exists()


def test_an_address_is_never_rewritten_to_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, mark = _program(tmp_path, "transport")
    lead(monkeypatch, tmp_path, f"ext::{program}", "[protocol]\n\tallow = always\n")
    with pytest.raises(InfrastructureError, match="not allowed"):
        Mirrors(tmp_path / "cache").open(ADDRESS).update()
    assert not mark.exists()


def test_output_over_its_cap_is_refused(server: Repository) -> None:
    git = Git(server.path)
    size = len(git("rev-list", "--all"))
    assert git("rev-list", "--all", max_output_bytes=size)
    with pytest.raises(OutputTooLargeError):
        git("rev-list", "--all", max_output_bytes=size - 1)


def test_a_failure_says_what_git_said_without_secrets(server: Repository) -> None:
    with pytest.raises(GitError, match="git cat-file failed with status 128"):
        Git(server.path)("cat-file", "-t", "0" * 40)
    with pytest.raises(SourceError) as refusal:
        Git(server.path)("fetch", "file://user:hunter2@localhost/nowhere")
    assert "hunter2" not in refusal.value.what


def test_a_machine_without_git_is_told_to_install_it(
    server: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InfrastructureError, match="git is not installed") as missing:
        Git(server.path)("rev-list", "--all")
    assert "apt-get install git" in missing.value.advice
