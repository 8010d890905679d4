"""What a student wrote can be shown in a terminal, in a log of a CI service and in a report."""

import json
import math

import pytest

from grader.judge.failure import CheckFailure, plain, require, sanitise


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, 中文, é\tand\nlines", "plain, 中文, é\tand\nlines"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://evil\x1b\\link", "link"),
        ("a\x00b\x07c\x9bd\x7f", "abcd"),
        ("over\u202ewritten\u200b", "overwritten"),
        ("line\r\nline\rline", "line\nline\nline"),
        ("\ud800lone", "lone"),
        ("::error::no", ": :error::no"),
        ("ok\n  ::add-mask::x", "ok\n  : :add-mask::x"),
        ("##[error]no", "# #[error]no"),
        ("std::vector is fine", "std::vector is fine"),
    ],
)
def test_escapes_and_workflow_commands_are_broken(text: str, shown: str) -> None:
    assert sanitise(text) == shown


def test_what_is_cut_says_how_much() -> None:
    shown = sanitise("a" * 5_000 + "b" * 5_000, 100)
    assert shown == "a" * 50 + "\n[9900 characters left out]\n" + "b" * 50


def test_endless_text_costs_no_endless_time() -> None:
    assert len(sanitise("\x1b[" * 10_000_000, 100)) < 200


def test_details_become_json_whatever_is_in_them() -> None:
    deep: dict[str, object] = {"a": 1}
    for _ in range(100):
        deep = {"deeper": deep}
    details = {"nan": math.nan, "list": list(range(1_000)), "deep": deep, "text": "\x1b[1mx", "tuple": (1, None, True)}
    shown = plain(details)
    json.dumps(shown, allow_nan=False)
    assert shown["nan"] == "nan"
    assert len(shown["list"]) == 64
    assert shown["text"] == "x"
    assert shown["tuple"] == [1, None, True]


def test_require_fails_the_check_and_not_the_judge() -> None:
    require([0], "never")
    with pytest.raises(CheckFailure) as caught:
        require([], "nothing came back", {"got": 1}, "count again")
    assert (caught.value.message, caught.value.details, caught.value.hint) == (
        "nothing came back",
        {"got": 1},
        "count again",
    )
