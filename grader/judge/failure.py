"""How a judge's test says that the student's answer is wrong, and how what a student wrote is made safe to show."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

MAX_MESSAGE = 2_000
MAX_VALUE = 500
MAX_ENTRIES = 64
_MAX_READ = 200_000  # longer text is cut before it is looked at
_WORKFLOW_COMMAND = re.compile(r"(?m)^(\s*):(?=:)|#(?=#\[)")
_TERMINAL_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~])"
)


class CheckFailure(Exception):  # noqa: N818  (a verdict on the answer, not an error of ours)
    """The answer is wrong. Any other exception in a judge's test is our fault, never the student's.

    Args:
        message: One or two sentences: what was compared, what came, what was expected.
        details: The numbers: rank, tensor, worst index, got, expected, errors, bound, what it looks like.
        hint: What the student may see of a hidden check too: no input and no expected value.
    """

    def __init__(self, message: str, details: Mapping[str, Any] | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.details = dict(details or {})
        self.hint = hint


def require(condition: object, message: str, details: Mapping[str, Any] | None = None, hint: str = "") -> None:
    """Fail the check unless `condition` holds. For judges' tests, where `assert` would count as our own bug.

    Raises:
        CheckFailure: It does not hold.
    """
    if not condition:
        raise CheckFailure(message, details, hint)


def sanitise(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return text that is safe in a terminal, a log of a CI service, and a report.

    Terminal escapes and control, format, surrogate and private characters go (a newline and a tab stay);
    workflow commands of a CI service (`::error::`, `##[error]`) are broken by a space; what is over `limit`
    characters is cut from the middle, with a mark that says how much.
    """
    text = _TERMINAL_ESCAPE.sub("", _cut(text, _MAX_READ)).replace("\r\n", "\n").replace("\r", "\n")
    kept = "".join(c for c in text if c in "\n\t" or not unicodedata.category(c).startswith("C"))
    return _cut(_WORKFLOW_COMMAND.sub(lambda found: found.group(0) + " ", kept), limit)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def plain(value: Any, depth: int = 4) -> Any:
    """Return `value` as JSON can hold it: texts sanitised, sequences capped, numbers that are not finite as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > 0 and isinstance(value, Mapping):
        entries = list(value.items())[:MAX_ENTRIES]
        return {sanitise(str(key), 100): plain(entry, depth - 1) for key, entry in entries}
    if depth > 0 and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(entry, depth - 1) for entry in value[:MAX_ENTRIES]]
    return sanitise(str(value), MAX_VALUE)
