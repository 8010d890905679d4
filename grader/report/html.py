"""One HTML file that needs no network and runs no script."""

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grader.record import Check, CheckStatus, Record
from grader.report.words import number, status_word, word

_NUMERIC_KEYS = (
    "rank",
    "tensor",
    "index",
    "got",
    "expected",
    "absolute_error",
    "relative_error",
    "bound",
    "looks_like",
)
_LONGEST_VALUE = 2_000

_environment = Environment(
    loader=PackageLoader("grader.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(record: Record, language: str) -> str:
    """Return the page."""
    template = _environment.get_template("report.html")
    return template.render(
        record=record,
        language="zh-CN" if language == "zh" else "en",
        word=lambda key: word(key, language),
        status=lambda status: status_word(status, language),
        number=number,
        rows=lambda check: _rows(check, language),
        first_steps=_first_steps(record),
        build_errors=_build_errors(record),
        environment=[(key, _shown(value)) for key, value in record.environment.items() if key != "build"],
    )


def _rows(check: Check, language: str) -> list[tuple[str, str]]:
    """Return the details of a check, those that the contract names first and in its order."""
    known = [(word(key, language), _shown(check.details[key])) for key in _NUMERIC_KEYS if key in check.details]
    others = [(key, _shown(value)) for key, value in check.details.items() if key not in _NUMERIC_KEYS]
    measured = [(key, number(value)) for key, value in check.metrics.items()]
    return known + others + measured


def _shown(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:.9g}"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} […{len(text) - _LONGEST_VALUE}]"


def _first_steps(record: Record) -> list[tuple[str, Check]]:
    """Return, in the assignment's order, the first failed check of each item that lost points by itself."""
    steps = []
    for item in record.items:
        failed = [check for check in item.checks if check.status not in _NO_FAULT and check.weight > 0]
        if failed and item.earned < item.points:
            steps.append((item.title, failed[0]))
    return steps[:3]


_NO_FAULT = {CheckStatus.PASSED, CheckStatus.SKIPPED, CheckStatus.NOT_RUN, CheckStatus.INFRA_ERROR}


def _build_errors(record: Record) -> list[dict[str, Any]]:
    build = record.environment.get("build", {})
    return list(build.get("errors", ())) if isinstance(build, dict) else []
