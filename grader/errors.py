"""The error tree. Deep code raises; only the command line prints.

GraderError                      exit code
├── UsageError                   2   a bad flag; a link that is refused
├── SourceError                  3   repository or commit not found, refused, ambiguous
└── InfrastructureError          4   our side broke; no student loses a point
    ├── SandboxError                 the sandbox could not be made, or died by itself
    └── WireError                    bytes that are not the frames they should be
"""


class GraderError(Exception):
    """Safe to show: one line of what happened, and one of what to do.

    Args:
        what: What happened, with the value that was met and what was expected.
        advice: What the reader can do about it; may be empty only where nothing can be done.
    """

    exit_code = 4

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice


class UsageError(GraderError):
    """What the user gave cannot be used: a bad flag, or a link that is refused."""

    exit_code = 2


class SourceError(GraderError):
    """The repository or the commit cannot be had: missing, access denied, ambiguous, or refused."""

    exit_code = 3


class InfrastructureError(GraderError):
    """Something on our side broke. Nothing was scored, and nobody loses a point."""

    exit_code = 4


class SandboxError(InfrastructureError):
    """The sandbox could not be made, or ended for a reason that is not the student's."""


class WireError(InfrastructureError):
    """Bytes that do not form the frame that they should form, or that exceed its caps."""
