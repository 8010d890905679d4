"""A record in, a report out. Computes nothing: every number on a page stands in the record."""

from collections.abc import Callable
from typing import Literal

from grader.record import Record
from grader.report import gradescope, html, junit, markdown
from grader.report.view import View, as_seen_by

Format = Literal["html", "md", "junit", "gradescope"]

RENDERERS: dict[str, Callable[[Record, str], str]] = {
    "html": html.render,
    "md": markdown.render,
    "junit": junit.render,
    "gradescope": gradescope.render,
}


def render(record: Record, form: Format, view: View = "student", language: str | None = None) -> str:
    """Return a report as text.

    Args:
        record: What was found.
        form: `html` is one self-contained file; `junit` is XML; `gradescope` is that service's JSON.
        view: A `student` sees of a hidden check its title, status and hint; `staff` sees all.
        language: `en` or `zh`; the record's own where left out.
    """
    return RENDERERS[form](as_seen_by(record, view), language or str(record.environment.get("language", "en")))
