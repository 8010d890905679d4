import json
import re
from xml.etree import ElementTree

import pytest

from grader.record import CheckStatus, Item, RecordStatus
from grader.report import RENDERERS, render
from tests.fixtures.records import HOSTILE, half_done, make_check, make_record

SECRETS = ("secret-input-value", "secret-expected-value", "secret-metric")


@pytest.mark.parametrize("form", RENDERERS)
def test_student_sees_title_and_hint_of_a_hidden_check_but_no_value(form):
    student, staff = render(half_done(), form, "student"), render(half_done(), form, "staff")
    assert "Uneven token counts" in student if form != "junit" else "hidden" in student
    assert not any(secret in student for secret in SECRETS)
    assert "secret-input-value" in staff


def test_seed_is_not_in_a_students_page():
    assert "1234" in render(half_done(), "html", "staff")
    assert "1234" not in render(half_done(), "html", "student")


def test_html_names_rank_tensor_index_got_expected_errors_and_bound_of_a_failed_number():
    page = render(half_done(), "html")
    for shown in ("blocks.0.attention.weight", "[3, 17]", "-0.5", "-0.125", "0.375", "1.25e-11", "world size"):
        assert shown in page


def test_html_shows_a_compile_error_once_with_file_line_and_message():
    page = render(half_done(), "html")
    assert page.count("src/kernels/linear.cc:42:7") == 1
    assert page.count("expected &#39;;&#39;") == 1


def test_html_runs_nothing_and_loads_nothing():
    page = render(half_done(), "html")
    assert "<script" not in page
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page)
    assert "default-src 'none'" in page


def test_markdown_shows_hostile_text_as_text():
    record = half_done()
    text = render(record, "md")
    fenced = text[text.index("`````") :]
    assert fenced.startswith("`````text\n")  # five ticks, since the text itself has four
    assert "alert(1)" in fenced


def test_markdown_carries_no_workflow_command_at_the_start_of_a_line():
    item = Item(
        id="x", title="::add-mask::x", points=1, earned=0, status=CheckStatus.FAILED,
        checks=(make_check(CheckStatus.FAILED, message="first\n  ::error file=a::forged\n::set-output name=a::b"),),
    )  # fmt: skip
    lines = render(make_record(item), "md").splitlines()
    assert not [line for line in lines if line.lstrip().startswith("::")]


def test_junit_counts_failures_errors_and_skips():
    root = ElementTree.fromstring(render(half_done(), "junit"))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "2", "1")


def test_junit_is_well_formed_whatever_a_student_printed():
    item = Item(
        id="x", title="x", points=1, earned=0, status=CheckStatus.CRASHED,
        checks=(make_check(CheckStatus.CRASHED, message=HOSTILE + "\x00\x08\ufffe]]>"),),
    )  # fmt: skip
    root = ElementTree.fromstring(render(make_record(item), "junit"))
    assert "alert(1)" in root.find(".//error").text


def test_gradescope_gives_no_score_where_our_side_broke():
    good = json.loads(render(half_done(), "gradescope"))
    broken = json.loads(render(half_done().model_copy(update={"status": RecordStatus.INFRA_ERROR}), "gradescope"))
    assert good["score"] == 5
    assert "score" not in broken
    assert [test["max_score"] for test in good["tests"]] == [5, 20, 10, 10]


def test_report_speaks_chinese_when_asked():
    page = render(half_done(), "html", language="zh")
    assert 'lang="zh-CN"' in page
    assert "未通过" in page
