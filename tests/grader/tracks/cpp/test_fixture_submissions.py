"""Submissions of the tiny framework, graded from a link to a record in containers."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from grader import grade
from grader.errors import SourceError
from grader.job import Request
from grader.record import CheckStatus, Record, RecordStatus
from grader.settings import Settings
from tests.fixtures.cpp_repositories import Submission, make_odd, make_student, make_upstream, write_assignment

pytestmark = [pytest.mark.docker, pytest.mark.slow]

DISPATCHER = (
    "official/DispatcherTest.RegisteredKernelIsCalled",
    "official/DispatcherTest.DuplicateIsRefused",
    "official/DispatcherTest.MissingIsRefused",
    "probe/dispatcher",
)
SQUARE = (
    "official/SquareTest.Forward",
    "official/SquareTest.Backward",
    "probe/square_forward",
    "probe/square_backward",
)
MOMENTUM = (
    "official/MomentumTest.FirstStepFollowsTheGradient",
    "official/MomentumTest.SecondStepRemembersTheFirst",
    "official/MomentumTest.ZeroGradForgetsGradients",
    "probe/momentum",
)
ALL = (*DISPATCHER, *SQUARE, *MOMENTUM, "probe/tokens")
PROBES = tuple(check for check in ALL if check.startswith("probe/"))
AVAILABLE, MAXIMUM = 12, 14

# What does not pass, by status, and the points that are left of each item.
EXPECTED: dict[str, tuple[dict[str, tuple[str, ...]], dict[str, float]]] = {
    "starter": (
        {
            "crashed": (DISPATCHER[0], DISPATCHER[3], *SQUARE[1:], MOMENTUM[0], MOMENTUM[1], MOMENTUM[3]),
            "failed": (DISPATCHER[1], SQUARE[0], "probe/tokens"),
        },
        {},
    ),
    "half_done": (
        {"failed": (SQUARE[1], SQUARE[3], MOMENTUM[0], MOMENTUM[1], MOMENTUM[3], "probe/tokens")},
        {"dispatcher": 4, "square": 1},  # a third of the probes' weight is less than half of the official cases
    ),
    "crashing": ({"crashed": (SQUARE[1], SQUARE[3])}, {"dispatcher": 4, "square": 1, "momentum": 3, "tokens": 2}),
    "hanging": ({"timeout": (MOMENTUM[1], MOMENTUM[3])}, {"dispatcher": 4, "square": 3, "tokens": 2}),
    "leaking": ({"out_of_memory": SQUARE}, {"dispatcher": 4, "momentum": 3, "tokens": 2}),
    "non_compiling": ({"build_error": ALL}, {}),
    "renamed_method": ({"build_error": MOMENTUM[:3]}, {"dispatcher": 4, "square": 3, "tokens": 2}),
    "reformatted": ({}, {"dispatcher": 4, "square": 3, "momentum": 3, "tokens": 2}),
    "forging": ({"failed": PROBES}, {}),
    "test_editing": ({"failed": (MOMENTUM[1], MOMENTUM[3])}, {"dispatcher": 4, "square": 3, "tokens": 2}),
}


class _Quiet:
    def phase(self, name: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass


Grade = Callable[[Submission], Record]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def variants(folder: Path) -> Mapping[str, Submission]:
    return make_student(folder / "student" / "work")


@pytest.fixture(scope="module")
def settings(folder: Path) -> Settings:
    write_assignment(folder / "assignments", make_upstream(folder / "upstream"))
    return Settings(cache=folder / "cache", assignments=folder / "assignments", judge_workers=1)


@pytest.fixture
def graded(folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Grade:
    """Grade by a link to a host that stands for a folder here, as a person's own git configuration may say."""
    own = folder / "gitconfig"
    own.write_text(f'[url "{(folder / "student").as_uri()}/"]\n\tinsteadOf = https://github.com/student/\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(own))

    def run(submission: Submission) -> Record:
        name = submission.repository.path.name
        link = f"https://github.com/student/{name}/tree/{submission.commit}"
        request = Request(link=link, student="tester")
        (grading,) = grade.grade(request, settings, _Quiet())
        return grading.record

    return run


def _statuses(record: Record) -> dict[str, CheckStatus]:
    return {check.id: check.status for item in record.items for check in item.checks}


def _messages(record: Record) -> dict[str, str]:
    return {check.id: check.message for item in record.items for check in item.checks}


def _require_full_marks(record: Record) -> None:
    assert _statuses(record) == dict.fromkeys(ALL, CheckStatus.PASSED) | {"probe/square_cuda": CheckStatus.NOT_RUN}
    assert (record.score, record.available, record.maximum) == (AVAILABLE, AVAILABLE, MAXIMUM)


@pytest.mark.parametrize("variant", EXPECTED)
def test_every_check_of_every_variant_ends_as_it_must(
    variant: str, variants: Mapping[str, Submission], graded: Grade
) -> None:
    record = graded(variants[variant])
    wrong, points = EXPECTED[variant]
    expected = dict.fromkeys(ALL, "passed") | {"probe/square_cuda": "not_run"}
    expected |= {check: status for status, checks in wrong.items() for check in checks}
    assert _statuses(record) == expected
    assert {item.id: item.earned for item in record.items if item.earned} == pytest.approx(points)
    assert (record.available, record.maximum) == (AVAILABLE, MAXIMUM)
    CLAIMS.get(variant, _nothing_more)(record)


def _nothing_more(record: Record) -> None:
    assert record.status is RecordStatus.GRADED
    assert "alert" not in {flag.severity for flag in record.flags}


def _one_error_in_the_students_own_words(record: Record) -> None:
    assert record.status is RecordStatus.BUILD_ERROR
    (error,) = record.environment["build"]["errors"]
    assert (error["path"], error["line"]) == ("infini_train/src/kernels/cpu/momentum.cc", 10)
    assert "has no member named" in error["message"]


def _flags_are_harmless(record: Record) -> None:
    assert record.flags
    assert {flag.severity for flag in record.flags} == {"info"}
    assert all("harmless" in flag.message for flag in record.flags)


def _edits_and_own_result_are_flagged(record: Record) -> None:
    flagged = {flag.path: flag.severity for flag in record.flags}
    assert flagged["test/optimizer/test_momentum.cc"] == flagged["test/autograd/test_square.cc"] == "warning"
    assert flagged["CMakeLists.txt"] == "info"  # kept, for some have to change it; ours was built with all the same
    assert flagged["record.json"] == "alert"
    assert record.environment["build"]["used_build_file"] == "pristine"


def _only_numbers_convict(record: Record) -> None:
    """Every official case is forged, so that points hang on the probes alone."""
    assert all("got 0, expected" in message for check, message in _messages(record).items() if check in PROBES)


CLAIMS: dict[str, Callable[[Record], None]] = {
    "non_compiling": _one_error_in_the_students_own_words,
    "reformatted": _flags_are_harmless,
    "test_editing": _edits_and_own_result_are_flagged,
    "forging": _only_numbers_convict,
}


@pytest.mark.parametrize("oddity", ["chinese_names", "gitlinks_changed", "missing_large_blob"])
def test_odd_trees_cost_nobody_a_point(oddity: str, folder: Path, graded: Grade) -> None:
    _require_full_marks(graded(make_odd(folder / "student" / oddity, oddity)))


def test_a_link_out_of_the_tree_is_flagged_and_leaks_nothing(folder: Path, graded: Grade) -> None:
    record = graded(make_odd(folder / "student" / "symlinks", "symlink_outside"))
    _require_full_marks(record)
    flagged = {flag.path for flag in record.flags if flag.severity == "warning"}
    assert "infini_train/src/kernels/cpu/secrets.cc" in flagged
    assert "root:" not in record.model_dump_json()


def test_a_commit_that_nothing_leads_to_is_refused(folder: Path, graded: Grade) -> None:
    with pytest.raises(SourceError, match="branch"):
        graded(make_odd(folder / "student" / "gone", "unreachable"))
