import json
from pathlib import PurePosixPath

import pytest

from grader.tracks.cpp.gtest import declared_cases, run_case
from grader.tracks.messages import CommandFinished, SubmissionFailure

SOURCE = b"""
TEST(Suite, First) {}
TEST_F( Fixture ,Second ) {}
// TEST(Suite, InAComment) {}
/* TEST(Suite, InABlock) {} */
"""


class Client:
    """Answers as an agent would after a program ended in a way that is chosen here."""

    class sandbox:  # noqa: N801
        root = PurePosixPath("/work")

    def __init__(self, outputs=None, **ending):
        answer = {"ending": "exited", "exit_code": 0, "stdout": "", "stderr": "", "out_of_memory": False, **ending}
        self.finished = CommandFinished(
            duration_s=1.0, truncated=False, peak_bytes=0, refused={}, outputs=outputs or {}, **answer
        )

    def run_command(self, command):
        return self.finished


def report(result="COMPLETED", failures=(), case="First"):
    entry = {"name": case, "result": result, **({"failures": [{"failure": f} for f in failures]} if failures else {})}
    return {"result.json": json.dumps({"testsuites": [{"name": "Suite", "testsuite": [entry]}]}).encode()}


def failure_of(client):
    with pytest.raises(SubmissionFailure) as caught:
        run_case(client, "test_x", "Suite.First")
    return caught.value


def test_cases_are_read_from_the_source_and_not_from_its_comments():
    assert declared_cases(SOURCE) == ("Suite.First", "Fixture.Second")


def test_case_that_ran_to_its_end_without_a_failure_has_passed():
    run_case(Client(report()), "test_x", "Suite.First")


def test_program_that_exits_early_with_zero_has_not_passed():
    assert failure_of(Client()).status == "crashed"


def test_printed_success_lines_are_worth_nothing():
    assert failure_of(Client(stdout="[  PASSED  ] 1 test.\n")).status == "crashed"


def test_report_of_another_case_is_worth_nothing():
    assert failure_of(Client(report(case="Other"))).status == "crashed"


def test_case_that_skips_itself_has_not_passed():
    assert failure_of(Client(report(result="SKIPPED"))).status == "failed"


def test_failure_carries_googletests_own_words():
    failure = failure_of(Client(report(failures=["Expected equality of 1 and 2"]), exit_code=1))
    assert (failure.status, failure.message) == ("failed", "Expected equality of 1 and 2")


def test_abort_is_told_with_the_fatal_message():
    stderr = "F1130 00:00:00.0 1 dispatcher.h:40] Check failed: contains Kernel not found: Neg\n*** Check failure\n"
    failure = failure_of(Client(ending="killed", exit_code=-6, stderr=stderr))
    assert failure.status == "crashed"
    assert "signal 6: Check failed: contains Kernel not found: Neg" in failure.message


def test_timeout_and_memory_have_their_own_words():
    assert failure_of(Client(ending="timeout", exit_code=None)).status == "timeout"
    assert failure_of(Client(ending="killed", exit_code=-9, out_of_memory=True)).status == "out_of_memory"


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b'{"testsuites": 3}', b"[" * 100_000])
def test_report_that_is_no_report_is_a_crash_and_never_an_error_of_ours(payload):
    assert failure_of(Client({"result.json": payload})).status == "crashed"
