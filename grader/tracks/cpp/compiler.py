"""What a compiler or a linker complained about, in the student's own paths, each thing once."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_DIAGNOSTIC = re.compile(
    r"^(?P<path>[^\s:][^:\n]*):(?P<line>\d+):(?:(?P<column>\d+):)? (?:fatal )?error: (?P<message>.*)$"
)
_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:?) ?[`'\"]?(?P<symbol>.+?)['\"]?$")
_FAILED = re.compile(r"^FAILED: (?:\[code=\d+\] )?(?P<output>\S+)")
_CMAKE = re.compile(r"^CMake Error(?: at (?P<path>[^:\n]+):(?P<line>\d+))?.*$")
_TARGET = re.compile(r"CMakeFiles/(?P<target>[^/]+)\.dir/")
_MOST = 20


@dataclass(frozen=True, slots=True)
class CompileError:
    """One complaint. `path` is relative to the student's repository; empty where none is named."""

    path: str
    line: int | None
    column: int | None
    message: str
    target: str


def errors(log: str, prefixes: tuple[str, ...]) -> tuple[CompileError, ...]:
    """Return the complaints of a build's log.

    Args:
        log: What CMake and ninja printed.
        prefixes: Folders that are cut from the beginning of paths.
    """
    seen: set[tuple[str, int | None, str]] = set()
    found = []
    for error in _scan(log, prefixes):
        key = (error.path, error.line, error.message)
        if key not in seen:
            seen.add(key)
            found.append(error)
    return tuple(found[:_MOST])


def _scan(log: str, prefixes: tuple[str, ...]) -> Iterator[CompileError]:
    target = ""
    lines = log.splitlines()
    for number, text in enumerate(lines):
        failed, diagnostic = _FAILED.match(text), _DIAGNOSTIC.match(text)
        undefined, cmake = _UNDEFINED.search(text), _CMAKE.match(text)
        if failed:
            of_object = _TARGET.search(failed["output"])
            target = of_object["target"] if of_object else failed["output"].rsplit("/", 1)[-1]
        elif diagnostic:
            column = int(diagnostic["column"]) if diagnostic["column"] else None
            path = _relative(diagnostic["path"], prefixes)
            yield CompileError(path, int(diagnostic["line"]), column, diagnostic["message"], target)
        elif undefined:
            yield CompileError("", None, None, f"undefined reference to {undefined['symbol']}", target)
        elif cmake:
            message = next((line.strip() for line in lines[number + 1 : number + 4] if line.strip()), text)
            line = int(cmake["line"]) if cmake["line"] else None
            yield CompileError(_relative(cmake["path"] or "", prefixes), line, None, message, "cmake")


def _relative(path: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        path = path.removeprefix(prefix)
    return path
