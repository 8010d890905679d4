"""The agent: the only code of the grader inside a sandbox. Speaks frames on standard input and output.

    python -m grader.agent.main [--users FIRST]

Until the first request for ranks (or `warm`) only the standard library is loaded. With `--users` foreign code runs
under user ids from FIRST on, a different one for every program and rank; without, under the agent's own.

Requests: `warm`, `run_command`, `run_ranks` (followed by one `rank_inputs` a rank). Answers: `ready` at the start,
`warmed`, `command_finished` or `not_started`, `ranks_finished`; `failed` with what broke, at the end.
"""

import argparse
import gc
import importlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grader.agent import command, privileges, ranks, streams
from grader.agent.host import Host
from grader.agent.waiting import Slot
from grader.errors import SandboxError, WireError

_COMMAND_USERS = 64  # ids from here on, above the first, are for programs; below, for ranks
_PRELOADED = (
    "numpy.ctypeslib",  # a rank may be unable to read where it lies
    "grader.agent.rank",
    "torch._dynamo",  # what optimisers import at their first step
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.checkpoint",
)


@dataclass(slots=True)
class Agent:
    """Answers the host's requests, one after the other.

    Attributes:
        root: The sandbox's root.
        first_user: The first user id for foreign code, or None.
    """

    host: Host
    root: str
    first_user: int | None

    @property
    def scratch(self) -> str:
        """Where the private folders of cases are made."""
        return f"{self.root}/cases"

    def serve(self) -> None:
        """Answer requests until the host closes the stream.

        Raises:
            SandboxError: Something on our side broke.
            WireError: The host said something that makes no sense.
            EOFError: The host is gone in the middle of a request.
        """
        privileges.harden_agent()
        if self.first_user is not None and not privileges.may_switch_users():
            raise SandboxError("the agent is to use other users, but has no capability to switch to them")
        os.mkdir(self.scratch)
        os.chmod(self.scratch, 0o711)  # noqa: S103 - children of other users pass through
        python = sys.version.split()[0]
        self.host.answer({"kind": "ready", "python": python, "own_users": self.first_user is not None})
        while (request := self.host.next_request()) is not None:
            self._handle(*request)

    def _handle(self, header: Mapping[str, Any], payload_bytes: int) -> None:
        match header.get("kind"):
            case "warm":
                self.host.answer(_warm())
            case "run_command":
                self._run_command(header, payload_bytes)
            case "run_ranks":
                self._run_ranks(header)
            case kind:
                raise WireError(f"a request of unknown kind {kind!r}")

    def _run_command(self, header: Mapping[str, Any], payload_bytes: int) -> None:
        request = command.Command.from_header(header)
        if payload_bytes != sum(size for _, size in request.inputs):
            raise WireError(f"the inputs announce another length than the payload's {payload_bytes} bytes")
        user = self._user(_COMMAND_USERS + int(header["user"]))
        command.run(request, root=self.scratch, user=user, host=self.host)

    def _run_ranks(self, header: Mapping[str, Any]) -> None:
        _warm()
        rank_module = sys.modules["grader.agent.rank"]
        request = ranks.Request.from_header(header)

        def be_rank(*, store: str, rank: int, slot: Slot) -> Any:
            job = rank_module.Job(
                world_size=request.world_size,
                harness=header["harness"],
                function=header["function"],
                arguments=header["arguments"],
                timeout_s=request.timeout_s,
                root=self.root,
                store=store,
            )
            return rank_module.run(job, rank, slot)

        users = [self._user(rank) for rank in range(request.world_size)]
        ranks.run(request, root=self.scratch, users=users, host=self.host, body=be_rank)

    def _user(self, offset: int) -> int | None:
        return None if self.first_user is None else self.first_user + offset


def _warm() -> dict[str, Any]:
    """Import torch and what ranks usually need, once."""
    started = time.monotonic()
    if "grader.agent.rank" not in sys.modules:
        os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
        for name in _PRELOADED:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # so that a collection in a rank does not copy the pages shared with this process
    threads = len(privileges.threads_of(os.getpid()))
    if threads != 1:
        raise SandboxError(f"importing torch started {threads - 1} threads; ranks cannot be forked from here")
    torch = sys.modules["torch"]
    return {"kind": "warmed", "torch": str(torch.__version__), "import_s": time.monotonic() - started}


def _take_protocol() -> tuple[int, int]:
    """Move the host's pipes away from where children and libraries look for standard streams."""
    source, target = (streams.high(os.dup(descriptor)) for descriptor in (0, 1))
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return source, target


def main() -> int:
    """Serve until the host is done; 0 then, 1 where something on our side broke."""
    parser = argparse.ArgumentParser(prog="grader.agent.main")
    parser.add_argument("--users", type=int, default=None, metavar="FIRST")
    first_user = parser.parse_args().users
    source, target = _take_protocol()
    with open(source, "rb", buffering=0) as stream:
        host = Host(stream, target)
        try:
            Agent(host, os.getcwd(), first_user).serve()
        except EOFError:
            return 0
        except (SandboxError, WireError, OSError) as error:
            host.answer({"kind": "failed", "what": str(error)[:4000]})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
