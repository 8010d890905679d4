"""What a person should look at in a submission. A finding alone costs no point."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_SHOWN = 5
_LONGEST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """An edit or a pattern for a person to look at.

    Attributes:
        kind: `edit`, `layout`, `added`, `missing`, `name`, `symlink`, `too_large`, `absent`, `lfs`, `result_file`.
        path: The file, fit to be shown; empty where the finding is about several.
        line: From 1, in the student's version; None where no line is meant.
    """

    kind: str
    severity: Literal["info", "warning", "alert"]
    path: str
    line: int | None
    message: str


def one(kind: str, severity: Literal["info", "warning", "alert"], path: str, message: str) -> Finding:
    """Return a finding about one file."""
    return Finding(kind, severity, shown(path), None, message)


def together(
    kind: str, severity: Literal["info", "warning", "alert"], paths: Sequence[str], message: str
) -> list[Finding]:
    """Return one finding for many files, or none for none: a formatter goes over a whole tree."""
    if len(paths) <= 1:
        return [one(kind, severity, path, message) for path in paths]
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    names = ", ".join(shown(path) for path in paths[:_SHOWN])
    return [Finding(kind, severity, "", None, f"{len(paths)} files: {message}: {names}{more}")]


def shown(path: str) -> str:
    """Return a path fit to be shown: any bytes can stand in a name."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
