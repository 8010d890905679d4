"""Whether an edit changes what a program says, or nothing but its layout and comments.

Programs are cut into tokens by linear scans of our own, for what is compared here was written by strangers: Pygments'
C++ lexer needs time exponential in the number of comments that end in a backslash, and the standard library's
`tokenize` time quadratic in the length of a line of quotes.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

MAX_COMPARED_BYTES = 1 << 20


class Change(StrEnum):
    """How much an edit changes."""

    NONE = "none"
    HARMLESS = "harmless"  # layout and comments
    REAL = "real"


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a program, and the line (from 1) on which it begins."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Edit:
    """How much changed, and the first line of the edited file where something real did."""

    change: Change
    line: int | None = None


def compare(path: str, original: bytes, edited: bytes) -> Edit:
    """Tell what an edit of a file changes; by token for C++, CUDA, CMake and Python, by line for all else."""
    if original == edited:
        return Edit(Change.NONE)
    if max(len(original), len(edited)) > MAX_COMPARED_BYTES or b"\0" in original + edited:
        return Edit(Change.REAL)
    scan = _scanner(path)
    before, after = scan(_text(original)), scan(_text(edited))
    return _difference(before, after)


def _difference(before: list[Token], after: list[Token]) -> Edit:
    for old, new in zip(before, after, strict=False):
        if old.text != new.text:
            return Edit(Change.REAL, new.line)
    if len(before) == len(after):
        return Edit(Change.HARMLESS)
    longer = after[len(before) :]
    return Edit(Change.REAL, longer[0].line if longer else (after[-1].line if after else None))


def _scanner(path: str) -> Callable[[str], list[Token]]:
    name = PurePosixPath(path)
    if name.suffix.lower() in {".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".inl"}:
        return _cpp
    if name.suffix.lower() == ".py":
        return _python
    if name.suffix.lower() == ".cmake" or name.name == "CMakeLists.txt":
        return _cmake
    return _lines


def _text(content: bytes) -> str:
    return content.decode("utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n")


def _lines(text: str) -> list[Token]:
    """Return the lines that hold anything, without the blanks at their ends."""
    return [Token(line.rstrip(), number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


# Every alternative is linear: none can match the same text in two ways.
_CPP = re.compile(
    r"""
      (?P<comment> //(?:[^\n\\]|\\(?:.|\n|\Z))* | /\*(?:[^*]|\*(?!/))*(?:\*/|\Z) )
    | (?P<raw> (?:u8|[uUL])?R"(?P<mark>[^()\\\s"]{0,16})\( )
    | (?P<string> (?:u8|[uUL])?(?:"(?:[^"\\\n]|\\(?:.|\n|\Z))*"? | '(?:[^'\\\n]|\\(?:.|\n|\Z))*'?) )
    | (?P<number> \.?[0-9](?:[eEpP][+-]|'(?=\w)|[\w.])* )
    | (?P<word> \w+ )
    | (?P<splice> \\[ \t]*\n )
    | (?P<newline> \n )
    | (?P<space> [ \t\f\v]+ )
    | (?P<operator> <=> | <<= | >>= | \.\.\. | ->\* | ->|\+\+|--|<<|&&|\|\||::|\#\#|\.\* | [-+*/%&|^!=<>]= )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_SILENT = frozenset({"comment", "splice", "newline", "space"})


def _cpp(text: str) -> list[Token]:
    """Cut C++ into tokens. Directives end with their line, and includes that stand together count in any order."""
    tokens: list[Token] = []
    directive: list[Token] | None = None
    includes: list[Token] = []
    for kind, token in _cpp_pieces(text):
        if directive is not None and kind in {"newline", "end"}:
            joined = Token(" ".join(part.text for part in directive), directive[0].line)
            directive = None
            if joined.text.startswith("# include"):
                includes.append(joined)
            else:
                _settle(tokens, includes)
                tokens.append(joined)
        elif kind in _SILENT or kind == "end":
            continue
        elif directive is not None:
            directive.append(token)
        elif token.text == "#":
            directive = [token]
        else:
            _settle(tokens, includes)
            tokens.append(token)
    _settle(tokens, includes)
    return tokens


def _settle(tokens: list[Token], includes: list[Token]) -> None:
    tokens.extend(sorted(includes, key=lambda token: token.text))
    includes.clear()


def _cpp_pieces(text: str) -> Iterator[tuple[str, Token]]:
    """Yield every piece with its kind, and `end` last."""
    position, line = 0, 1
    while position < len(text):
        found = _CPP.match(text, position)
        assert found is not None  # `other` takes any character
        kind = "raw" if found["raw"] else str(found.lastgroup)
        end = found.end()
        if kind == "raw":
            closed = text.find(f'){found["mark"]}"', end)
            end = len(text) if closed < 0 else closed + len(found["mark"]) + 2
        piece = text[position:end]
        yield kind, Token(piece, line)
        position, line = end, line + piece.count("\n")
    yield "end", Token("", line)


_CMAKE = re.compile(
    r"(?P<comment>\#\[(?P<level>=*)\[.*?(?:\](?P=level)\]|\Z)|\#[^\n]*)|(?P<space>\s+)"
    r'|(?P<string>"(?:[^"\\]|\\.|\\\Z)*"?)|(?P<punctuation>[()])|(?P<word>(?:[^\s()"\#\\]|\\.|\\\Z)+)',
    re.DOTALL,
)


def _cmake(text: str) -> list[Token]:
    tokens: list[Token] = []
    line = 1
    for found in _CMAKE.finditer(text):
        if found["comment"] is None and found["space"] is None:
            tokens.append(Token(found[0], line))
        line += found[0].count("\n")
    return tokens


_PYTHON = re.compile(
    r"""
      (?P<comment> \#[^\n]* )
    | (?P<string> [rRbBuUfF]{0,2}(?:
          \"{3}(?:[^"\\]|\\.|"(?!""))*(?:\"{3}|\Z) | '{3}(?:[^'\\]|\\.|'(?!''))*(?:'{3}|\Z)
        | "(?:[^"\\\n]|\\.)*"? | '(?:[^'\\\n]|\\.)*'? ) )
    | (?P<number> \.?[0-9](?:[eE][+-]|[\w.])* )
    | (?P<word> \w+ )
    | (?P<splice> \\\n )
    | (?P<newline> \n )
    | (?P<space> [ \t\f\v]+ )
    | (?P<operator> \*\*=? | //=? | <<=? | >>=? | -> | := | \.\.\. | [-+*/%&|^@!=<>]= )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)


def _python(text: str) -> list[Token]:
    """Cut Python into tokens; how deep a block is indented does not matter, where it begins and ends does."""
    tokens: list[Token] = []
    levels, depth, line, width, begins = [0], 0, 1, 0, True
    for found in _PYTHON.finditer(text):
        kind, piece = found.lastgroup, found[0]
        if kind == "space" and begins:
            width += len(piece.expandtabs())
        elif kind == "newline" and depth == 0:
            if not begins:
                tokens.append(Token("<newline>", line))
            width, begins = 0, True
        elif kind not in _SILENT:
            if begins:
                tokens.extend(Token(step, line) for step in _steps(levels, width))
                begins = False
            depth = max(0, depth + (piece in _OPENING) - (piece in _CLOSING))
            tokens.append(Token(piece, line))
        line += piece.count("\n")
    return tokens if begins else [*tokens, Token("<newline>", line)]


_OPENING = frozenset("([{")
_CLOSING = frozenset(")]}")


def _steps(levels: list[int], width: int) -> Iterator[str]:
    """Yield the blocks that begin or end where a line is indented by `width` columns, and keep count of them."""
    while width < levels[-1]:
        levels.pop()
        yield "<dedent>"
    if width > levels[-1]:
        levels.append(width)
        yield "<indent>"
