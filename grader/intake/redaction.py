"""Takes secrets out of text that people will read: a student's committed password, the staff's own tokens."""

import re

_MARK = "[redacted]"
_SECRETS = (
    (re.compile(r"(?<=://)[^/\s@]{1,256}@"), f"{_MARK}@"),  # user:password in an address
    (
        re.compile(r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16})\b"),
        _MARK,
    ),
    (
        re.compile(r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,32}PRIVATE KEY-----)?"),
        _MARK,
    ),
    (
        re.compile(r"(?i)\b(pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key)(\s{0,4}[:=]\s{0,4})[^\s,;]{1,256}"),
        rf"\1\2{_MARK}",
    ),
)


def redact(text: str) -> str:
    """Return the text with passwords, tokens and private keys replaced by a mark."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
