"""Whether two versions of a file differ in more than layout and comments, and where. Lexed with Pygments."""

from functools import cache
from pathlib import PurePosixPath

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_for_filename
from pygments.token import _TokenType
from pygments.util import ClassNotFound


def differs(path: str, mine: bytes, original: bytes) -> bool:
    """Say whether the files differ in anything that a compiler or an interpreter sees."""
    return mine != original and first_difference(path, mine, original) is not None


def first_difference(path: str, mine: bytes, original: bytes) -> int | None:
    """Return the line (from 1) of `mine` where the first token differs, or None where all tokens are the same."""
    left, right = _tokens(path, mine), _tokens(path, original)
    for (line, token), (_, other) in zip(left, right, strict=False):
        if token != other:
            return line
    if len(left) == len(right):
        return None
    return left[len(right)][0] if len(left) > len(right) else (left[-1][0] if left else 1)


def _tokens(path: str, content: bytes) -> list[tuple[int, str]]:
    """Return (line, text) of every token that matters. In Python the indentation of a line matters too."""
    text = content.decode("utf-8", "replace").replace("\r\n", "\n").removeprefix("\ufeff")
    lexer = _lexer(PurePosixPath(path).name)
    if lexer is None:
        return [(number, line.rstrip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    keeps_indent = path.endswith((".py", ".pyi"))
    found: list[tuple[int, str]] = []
    line, at_start = 1, True
    for kind, value in lexer.get_tokens(text):
        if _matters(kind):
            if value.strip():
                found += [(line, word) for word in value.split()]
                at_start = False
            elif keeps_indent and at_start and value.strip("\n"):
                found.append((line, f"<indent {len(value.expandtabs())}>"))
        if "\n" in value:
            line += value.count("\n")
            at_start = True
    return found


def _matters(kind: _TokenType) -> bool:
    """Whether a token is more than a comment; what a C++ preprocessor reads is lexed as a kind of comment."""
    family = str(kind)
    return not family.startswith("Token.Comment") or family.startswith("Token.Comment.Preproc")


@cache
def _lexer(name: str) -> Lexer | None:
    try:
        lexer: Lexer = get_lexer_for_filename(name, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None
    return lexer
