"""What only a container can promise, or a machine where the agent may change users."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from grader import images
from grader.sandbox.base import MEBIBYTE, Limits, Specification
from grader.tracks.agent import AgentClient, Command, ProgramLimits
from grader.tracks.torch.session import Session
from tests.grader.tracks.plain import PlainSandbox
from tests.grader.tracks.torch.calls import LIMITS, call, failure, open_session, student_files

PLACES = [pytest.param("docker", marks=pytest.mark.docker), *(["as root"] if os.geteuid() == 0 else [])]


def in_container(memory_bytes: int, limits: ProgramLimits) -> Session:
    specification = Specification(
        image=images.require("torch"), label="tests", limits=Limits(memory_bytes=memory_bytes)
    )
    return open_session("docker", specification, "python3", limits)


@pytest.fixture(scope="module", params=PLACES)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    if request.param == "docker":
        opened = in_container(4096 * MEBIBYTE, LIMITS)
    else:
        opened = Session(
            AgentClient.start(PlainSandbox(), student_files(), sys.executable, own_users=True, needs_torch=True),
            LIMITS,
        )
    with opened:
        yield opened


def test_every_rank_runs_as_a_user_of_its_own_in_a_folder_of_its_own(session: Session):
    values = [result.values for result in call(session, "all_reduce", 4)]
    assert len({value["user"] for value in values}) == 4
    assert len({value["folder"] for value in values}) == 4
    assert min(value["user"] for value in values) >= 1_000_000


def test_the_sum_is_right_whoever_the_ranks_are(session: Session):
    for result in call(session, "all_reduce", 4):
        assert torch.equal(result.tensors["total"], torch.full((3,), 6.0, dtype=torch.float64))


def test_no_attack_on_the_agent_or_another_rank_works(session: Session):
    for result in call(session, "attack_the_agent"):
        assert result.values["worked"] == []


def test_a_fork_bomb_ends_with_the_case_and_the_next_case_runs(session: Session):
    assert failure(session, "bomb", timeout_s=2.0).status == "timeout"
    assert len(call(session, "all_reduce")) == 2


def test_what_a_rank_leaves_where_all_may_write_is_gone_before_the_next_case(session: Session):
    left = {str(result.values["pid"]) for result in call(session, "leave_files")}
    call(session, "all_reduce", 1)
    listing = session.client.run_command(Command(argv=["ls", "/tmp", "/dev/shm"], timeout_s=20))
    assert not left & {name.removeprefix("left-") for name in listing.stdout.split()}


def test_nothing_of_a_daemon_is_left(session: Session):
    daemons = {str(result.values["daemon"]) for result in call(session, "leave_daemons")}
    listing = session.client.run_command(Command(argv=["ls", "/proc"], timeout_s=20))
    assert not daemons & set(listing.stdout.split())


def test_ranks_that_wait_for_each_other_are_named(session: Session):
    message = failure(session, "receive_from_each_other").message
    assert "rank 0 waits to receive from rank 1" in message
    assert "rank 1 waits to receive from rank 0" in message


@pytest.mark.docker
def test_the_rank_that_uses_up_the_containers_memory_is_named_and_the_agent_lives_on():
    with in_container(1024 * MEBIBYTE, ProgramLimits(memory_bytes=8192 * MEBIBYTE)) as session:
        raised = failure(session, "allocate_without_end")
        assert raised.status == "out_of_memory"
        assert raised.message.startswith("rank 1 was killed because the memory")
        assert len(call(session, "all_reduce")) == 2
