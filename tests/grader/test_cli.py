import json
import subprocess
import sys

import pytest

from assignments.data_parallel import sample
from grader import cli, signature
from grader.record import Record
from grader.store import record_bytes, write_folder
from tests.fixtures.records import half_done


def grader(*arguments, code=0, **environment):
    import os  # noqa: PLC0415

    done = subprocess.run(
        [sys.executable, "-m", "grader.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), **environment},
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return {stage.name: stage for stage in sample.make(tmp_path_factory.mktemp("sample") / "student")}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["submit"], 2, "URL"),
        (["submit", "https://github.com/u/r/tree/0123abc", "--gpus", "-1"], 2, "gpus"),
        (["submit", "hello"], 2, "no link"),
        (["submit", "https://evil.example/u/r/tree/28d8951"], 2, "host"),
        (["submit", "https://github.com/u/r/tree/28d"], 2, "28d"),
        (["submit", "file:///nowhere/r@28d8951", "--runner", "local"], 3, "nowhere"),
        (["submit", "https://github.com/u/r/tree/0123abc", "--assignment", "none"], 2, "none"),
        (["submit", "https://github.com/u/r/tree/0123abc", "--server", "http://x"], 2, "server"),
        (["assignments", "none"], 2, "none"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_input_has_its_exit_code_and_says_what_and_what_to_do(arguments, code, said, cache):
    done = grader(*arguments, code=code, GRADER_CACHE=cache)
    assert said in done.stderr
    assert done.stdout == ""


def test_link_says_what_a_link_names_without_fetching():
    done = grader("link", "https://github.com/u/TinyInfiniTrain/tree/28d8951\uff09", "--json")
    assert json.loads(done.stdout) == {
        "repository": "https://github.com/u/TinyInfiniTrain",
        "ref": "28d8951",
        "verdict": "ok",
    }


def test_link_that_is_refused_is_described_and_ends_with_two():
    done = grader("link", "ext::sh -c id", "--json", code=2)
    assert json.loads(done.stdout)["verdict"] == "refused"


def test_assignments_lists_items_and_points():
    assert "data_parallel" in grader("assignments").stdout
    assert "gpt2" in grader("assignments", "tinyinfinitrain").stdout


def test_submit_leaves_a_record_and_reports_and_prints_nothing_but_json(stages, cache, tmp_path):
    right = stages["right"]
    done = grader(
        "submit",
        right.link,
        "--runner",
        "local",
        "--json",
        "--out",
        tmp_path / "out",
        "--student",
        "李雷",
        GRADER_CACHE=cache,
    )
    (line,) = done.stdout.splitlines()
    record = Record.model_validate_json(line)
    assert (record.score, record.available) == (100, 100)
    assert record.submission.commit == right.commit
    assert record.submission.student == "李雷"
    assert (record.runner.kind, record.runner.isolated) == ("local", False)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"record.json", "report.html", "report.md", "junit.xml", "logs"} <= names
    assert Record.model_validate_json((tmp_path / "out" / "record.json").read_bytes()) == record
    again = grader("submit", right.link, "--runner", "local", "--json", "--out", tmp_path / "two", GRADER_CACHE=cache)
    repeated = Record.model_validate_json(again.stdout)
    assert repeated.items == record.items
    assert repeated.submission.student is None
    assert "from the cache" in again.stderr


def test_fail_under_ends_with_one_and_a_bug_is_named(stages, cache, tmp_path):
    done = grader(
        "submit", stages["a bug"].link, "--runner", "local", "--out", tmp_path / "out", "--fail-under", "60",
        code=1, GRADER_CACHE=cache,
    )  # fmt: skip
    assert "1 / the world size" in (tmp_path / "out" / "report.html").read_text()
    assert "report:" in done.stderr


def test_local_repository_is_not_graded_without_saying_local(stages, cache):
    done = grader("submit", stages["right"].link, code=2, GRADER_CACHE=cache)
    assert "--runner local" in done.stderr


def test_report_is_drawn_from_a_record(tmp_path):
    write_folder(tmp_path / "out", {"record.json": record_bytes(half_done())})
    page = grader("report", tmp_path / "out" / "record.json", "-f", "md").stdout
    assert "Bucketed DDP" in page
    assert "secret" not in page
    grader("report", tmp_path / "out" / "record.json", "-f", "html", "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_signed_record_is_verified_and_an_edited_one_recognised(tmp_path):
    key = tmp_path / "key.pem"
    public = grader("keys", "--key", key).stdout.strip()
    signed = signature.sign(half_done(), signature.load_key(key))
    write_folder(tmp_path / "out", {"record.json": record_bytes(signed)})
    assert "genuine" in grader("report", tmp_path / "out/record.json", "--verify", "--key", public).stdout
    edited = signed.model_copy(update={"score": 99.0})
    write_folder(tmp_path / "out", {"record.json": record_bytes(edited)})
    assert "forged" in grader("report", tmp_path / "out/record.json", "--verify", "--key", public, code=1).stdout


def test_doctor_says_what_is_there():
    assert "git" in grader("doctor").stdout


def test_bug_of_ours_ends_with_four_a_log_and_no_traceback(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GRADER_LOG", str(tmp_path / "grader.log"))

    def broken(**_):
        raise RuntimeError("a bug")

    assert cli.run_edge(broken) == 4
    assert "nothing was scored" in capsys.readouterr().err
    assert "RuntimeError: a bug" in (tmp_path / "grader.log").read_text()
