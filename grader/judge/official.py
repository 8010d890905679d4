"""Official test cases as pytest items. Which there must be is read from the pinned original, never from a binary."""

from typing import Any, Self

import pytest

from grader.judge.submission import Submissions

SUBMISSIONS = pytest.StashKey[Submissions]()


class OfficialCase(pytest.Item):
    """One case of an official test file, run on its own, so that a crash costs this case alone."""

    item_id: str
    target: str
    case: str

    @classmethod
    def make(cls, session: pytest.Session, item_id: str, target: str, case: str) -> Self:
        """Return the pytest item of `case` (`Suite.Case`) in the program `target`."""
        made: Self = cls.from_parent(session, name=f"{item_id}:official/{case}")
        made.item_id, made.target, made.case = item_id, target, case
        return made

    @property
    def check_id(self) -> str:
        """The check's id in the record."""
        return f"official/{self.case}"

    def runtest(self) -> None:
        """Run the case in the sandbox.

        Raises:
            SubmissionFailure: It did not pass, or was not built.
            InfrastructureError: The sandbox failed.
        """
        self.config.stash[SUBMISSIONS].official(self.target, self.case)

    def reportinfo(self) -> Any:
        """Say where it comes from, for pytest's own output."""
        return (self.target, None, self.name)
