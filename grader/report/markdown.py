"""Markdown for a pull request, a step summary or a mail. Everything a student wrote is escaped or fenced."""

import re

from grader.record import Check, CheckStatus, Item, Record
from grader.report.words import number, status_word, word

_SIGN = {
    CheckStatus.PASSED: "✅",
    CheckStatus.SKIPPED: "⏭️",
    CheckStatus.NOT_RUN: "➖",
    CheckStatus.INFRA_ERROR: "🔧",
}
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+.!|<>&~@:-])")


def escape(text: str) -> str:
    """Return text that Markdown shows as it is: on one line, and with no link, mention, HTML or workflow command."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def fence(text: str) -> str:
    """Return text as a code block that nothing inside can close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    # A runner takes a printed line that begins with `::` for one of its commands, indented or not.
    quoted = "\n".join(re.sub(r"^(\s*):(?=:)", "\\1:\N{ZERO WIDTH SPACE}", line) for line in text.splitlines())
    return f"{ticks}text\n{quoted}\n{ticks}"


def render(record: Record, language: str) -> str:
    """Return the report as GitHub-flavoured Markdown."""
    blocks = [_head(record, language), _table(record, language)]
    blocks += [block for item in record.items for block in _item(item, language)]
    if record.flags:
        blocks.append(_flags(record, language))
    return "\n\n".join(blocks) + "\n"


def _head(record: Record, language: str) -> str:
    of = word("of", language)
    lines = [
        f"# {escape(record.assignment.title)}",
        "",
        f"**{word('score', language)}: {number(record.score)} {of} {number(record.available)}** "
        f"({word('available_here', language)}; {word('whole', language)}: {number(record.maximum)})",
        "",
        f"- {word('repository', language)}: {escape(record.submission.repository)}",
        f"- {word('commit', language)}: `{record.submission.commit}`",
        f"- {word('runner', language)}: {record.runner.kind}, "
        f"{word('isolated' if record.runner.isolated else 'not_isolated', language)}",
    ]
    if record.provisional:
        lines.append(f"- **{word('provisional', language)}**: {escape(record.provisional_reason)}")
    return "\n".join(lines)


def _table(record: Record, language: str) -> str:
    rows = [
        f"| {word('item', language)} | {word('points', language)} | {word('status', language)} |",
        "|---|---:|---|",
    ]
    for item in record.items:
        points = f"{number(item.earned)} / {number(item.points)}"
        rows.append(
            f"| {escape(item.title)} | {points} | {_SIGN.get(item.status, '❌')} {status_word(item.status, language)} |"
        )
    return "\n".join(rows)


def _item(item: Item, language: str) -> list[str]:
    shown = [check for check in item.checks if check.status is not CheckStatus.PASSED]
    if not shown:
        return []
    return [f"## {escape(item.title)}"] + [_check(check, language) for check in shown]


def _check(check: Check, language: str) -> str:
    sign = _SIGN.get(check.status, "❌")
    lines = [f"{sign} **{escape(check.title)}** (`{check.id}`): {status_word(check.status, language)}"]
    if check.message:
        lines += ["", fence(check.message)]
    if check.hint:
        lines += ["", f"{word('hint', language)}: {escape(check.hint)}"]
    return "\n".join(lines)


def _flags(record: Record, language: str) -> str:
    lines = [f"## {word('flags', language)}", "", word("flags_note", language), ""]
    for flag in record.flags:
        place = f"{flag.path}:{flag.line}" if flag.line else flag.path
        lines.append(f"- {flag.severity}: {escape(place)} {escape(flag.message)}")
    return "\n".join(lines)
