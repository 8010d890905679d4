"""Where student code runs. One protocol, two kinds."""

from collections.abc import Callable
from typing import Literal

from grader.sandbox.base import Sandbox, Specification
from grader.sandbox.docker import DockerSandbox
from grader.sandbox.local import LocalSandbox

KINDS: dict[str, Callable[[Specification], Sandbox]] = {"docker": DockerSandbox, "local": LocalSandbox}


def open_sandbox(kind: Literal["docker", "local"], specification: Specification) -> Sandbox:
    """Make a sandbox of the kind that was asked for.

    Raises:
        SandboxError: It cannot be made here.
    """
    return KINDS[kind](specification)
