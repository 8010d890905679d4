"""The pipeline: a link goes in, gradings come out. `grade` reads from top to bottom."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol


class Progress(Protocol):
    """Who is told how far a grading is."""

    def phase(self, name: str) -> None:
        """A phase begins: fetch, prepare, build, run, judge."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line happened."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for. `runner` is `docker` unless the person asked for `local` in so many words."""

    link: str
    assignment: str | None = None
    student: str | None = None
    runner: Literal["docker", "local"] = "docker"
    gpus: int = 0
    language: Literal["en", "zh"] = "en"
    fresh: bool = False


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent in each phase."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase, and say that it began."""
        self.progress.phase(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[f"{name}_s"] = self.seconds.get(f"{name}_s", 0.0) + time.monotonic() - began
