"""The table that a person sees after a grading. Drawn with `rich`, whose `Text` shows markup as plain text."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grader.record import CheckStatus, Item, Record
from grader.report.words import number, status_word, word

_STYLE = {
    CheckStatus.PASSED: "green",
    CheckStatus.SKIPPED: "dim",
    CheckStatus.NOT_RUN: "dim",
    CheckStatus.INFRA_ERROR: "magenta",
}


def show(record: Record, console: Console, language: str) -> None:
    """Print items, failed checks with their first line, flags that are more than information, and the score."""
    console.print(_table(record, language))
    for flag in record.flags:
        if flag.severity != "info":
            console.print(Text(f"! {flag.path}: {flag.message}", style="yellow"))
    if record.provisional:
        console.print(Text(f"{word('provisional', language)}: {record.provisional_reason}", style="yellow"))
    total = f"{number(record.score)} {word('of', language)} {number(record.available)}"
    console.print(
        Text(f"{word('score', language)}: {total}", style="bold"),
        Text(f"({word('whole', language)}: {number(record.maximum)})", style="dim"),
    )


def _table(record: Record, language: str) -> Table:
    table = Table(title=Text(f"{record.assignment.title} @ {record.submission.commit[:12]}"), expand=False)
    table.add_column(word("item", language))
    table.add_column(word("points", language), justify="right")
    table.add_column(word("status", language))
    table.add_column("", overflow="fold")
    for item in record.items:
        table.add_row(
            Text(item.title),
            f"{number(item.earned)} / {number(item.points)}",
            Text(status_word(item.status, language), style=_STYLE.get(item.status, "red")),
            Text(_reasons(item)),
        )
    return table


def _reasons(item: Item) -> str:
    """Return a line for each check that went wrong; what was not run has one line together."""
    bad = [check for check in item.checks if check.status not in {CheckStatus.PASSED, CheckStatus.NOT_RUN}]
    lines = [f"{check.id}: {(check.message or check.hint).split(chr(10))[0]}" for check in bad]
    if item.status is CheckStatus.NOT_RUN and item.checks:
        lines.append(item.checks[0].message)
    return "\n".join(lines)
