import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save

from grader.errors import InfrastructureError
from grader.sandbox.base import Specification
from grader.tracks.agent import AgentClient
from grader.tracks.torch.session import Session
from tests.grader.tracks.plain import PlainSandbox
from tests.grader.tracks.torch.calls import LIMITS, MAX_RESULT_BYTES, call, failure, open_session, student_files

USERS = ["one user", *(["own users"] if os.geteuid() == 0 else [])]


def start(users: str) -> Session:
    if users == "own users":
        client = AgentClient.start(PlainSandbox(), student_files(), sys.executable, own_users=True, needs_torch=True)
        return Session(client, LIMITS, MAX_RESULT_BYTES)
    return open_session("local", Specification(), sys.executable)


@pytest.fixture(scope="module", params=USERS)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    with start(request.param) as opened:
        yield opened


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_its_own_inputs_and_hands_back_the_sum(session: Session, ranks: int):
    results = call(session, "all_reduce", ranks)
    expected = torch.full((3,), float(sum(range(ranks))), dtype=torch.float64)
    assert [result.rank for result in results] == list(range(ranks))
    assert all(torch.equal(result.tensors["total"], expected) for result in results)
    assert [result.stdout for result in results] == [f"hello from rank {rank}\n" for rank in range(ranks)]


def test_every_rank_has_a_folder_of_its_own_that_is_gone_afterwards(session: Session):
    folders = [result.values["folder"] for result in call(session, "all_reduce", 4)]
    assert len(set(folders)) == 4
    call(session, "all_reduce", 1)
    assert not any(os.path.exists(folder) for folder in folders)


def test_many_short_collectives_never_hang_on_the_recorder(session: Session):
    for _ in range(3):
        assert len(call(session, "many_short_collectives", 4)) == 4


def test_torchs_own_wrappers_collectives_and_groups_work_under_the_recorder(session: Session):
    results = call(session, "everything_torch_has", 4)
    for rank, result in enumerate(results):
        assert result.tensors["gathered"].tolist() == [0, 1, 2, 3]
        assert result.tensors["scattered"].tolist() == [4.0 * rank]
        assert result.tensors["exchanged"].tolist() == [0, 1, 2, 3]
        assert result.tensors["received"].tolist() == [(rank - 1) % 4]


def test_bytes_sent_follow_the_ring_formula_and_count_only_what_a_rank_sends(session: Session):
    sent = [result.values["sent"] for result in call(session, "count_bytes", 2)]
    assert sent == [[0, 24, 48], [0, 24, 24]]


def test_tensors_that_share_memory_come_back_apart_and_equal(session: Session):
    tensors = call(session, "hand_back_shared_memory")[0].tensors
    assert torch.equal(tensors["same"], tensors["parameter"])
    assert torch.equal(tensors["view"], tensors["x"].t())


def test_a_rank_that_raises_is_named_with_the_students_line_and_what_the_others_waited_for(session: Session):
    raised = failure(session, "raise_on_rank_1")
    assert raised.status == "crashed"
    pattern = r"rank 1 raised ValueError at parallel/behaviours\.py:\d+: the .*bucket.* is empty"
    assert re.match(pattern, raised.message)
    assert re.search(r"rank 0 wait(s|ed) to receive from rank 1", raised.message)
    assert [frame["function"] for frame in raised.details["frames"]] == ["raise_on_rank_1", "_deep_inside"]
    assert "\x1b" not in raised.message
    assert "\n" not in raised.message
    assert "grader/agent" not in raised.details["stderr"]
    assert 'File "parallel/behaviours.py"' in raised.details["stderr"]


def test_a_rank_that_exits_early_without_a_result_is_named(session: Session):
    raised = failure(session, "exit_early")
    assert raised.status == "crashed"
    assert raised.message.startswith("rank 1 ended early, with exit code 0, and handed back nothing")
    assert re.search(r"rank 0 wait(s|ed) in the all_reduce of ranks 0, 1", raised.message)


def test_system_exit_is_a_crash_and_what_was_registered_for_the_end_never_runs(session: Session):
    raised = failure(session, "exit_through_system_exit")
    assert raised.status == "crashed"
    assert "SystemExit" in raised.message


def test_a_rank_that_is_killed_is_named_with_the_signal(session: Session):
    raised = failure(session, "kill_itself")
    assert raised.status == "crashed"
    assert raised.message.startswith("rank 1 was killed by signal 11")


def test_a_rank_that_hangs_is_named_with_its_line_and_nothing_is_left(session: Session):
    started = time.monotonic()
    raised = failure(session, "hang", timeout_s=1.0)
    assert time.monotonic() - started < 20
    assert raised.status == "timeout"
    assert re.search(r"rank 1 \(at parallel/behaviours\.py:\d+\) did not finish", raised.message)
    assert "rank 0 waits in the all_reduce" in raised.message


def test_ranks_that_wait_for_each_other_are_named_long_before_their_time_is_up(session: Session):
    call(session, "all_reduce")
    started = time.monotonic()
    raised = failure(session, "receive_from_each_other", timeout_s=60)
    assert time.monotonic() - started < 20
    assert raised.status == "timeout"
    assert "rank 0 waits to receive from rank 1" in raised.message
    assert "rank 1 waits to receive from rank 0" in raised.message


def test_a_rank_that_waits_for_one_that_has_finished_is_named(session: Session):
    raised = failure(session, "finish_without_the_other")
    assert raised.status == "timeout"
    assert "rank 0 waits to receive from rank 1" in raised.message
    assert "rank 1 has finished" in raised.message


def test_ranks_that_disagree_about_the_communication_are_named(session: Session):
    raised = failure(session, "disagree")
    assert "rank 0 waits in the all_reduce of ranks 0, 1" in raised.message
    assert "rank 1 waits to receive from rank 0" in raised.message


def test_a_rank_that_computes_for_long_is_no_standstill(session: Session):
    assert len(call(session, "compute_for_long")) == 2


def test_a_hundred_megabytes_of_output_are_capped_and_keep_their_end(session: Session):
    result = call(session, "print_much")[0]
    assert len(result.stdout) < 300 << 10
    assert "bytes left out" in result.stdout
    assert result.stdout.endswith("\ufffd\ufffd the end")


def test_garbage_in_every_descriptor_fails_the_submission_alone(session: Session):
    assert failure(session, "write_garbage_everywhere").status == "crashed"
    assert len(call(session, "all_reduce")) == 2


def test_a_rank_holds_no_descriptor_but_its_own(session: Session):
    found = call(session, "list_descriptors", 1)[0].values["descriptors"]
    links = {int(number): link for number, link in found.items()}
    assert links[0] == "/dev/null"
    pipes = Counter(link for link in links.values() if link.startswith("pipe:"))
    # The group's own pipes have both ends in the process; what leads out of it has one.
    leading_out = [number for number, link in links.items() if pipes[link] == 1]
    assert leading_out == [1, 2, 4]
    files = {link for link in links.values() if link.startswith("/")}
    assert all(link == "/dev/null" or link.startswith("/proc/") or link.endswith("/store") for link in files)


def test_daemons_are_gone_when_the_case_is_over(session: Session):
    results = call(session, "leave_daemons")
    for result in results:
        with pytest.raises(ProcessLookupError):
            os.kill(result.values["daemon"], 0)


def test_a_result_over_its_cap_is_cut_off_and_named(session: Session):
    raised = failure(session, "hand_back_much", 1)
    assert raised.status == "crashed"
    assert raised.message == "rank 0 handed back more than a result may have"


@pytest.mark.parametrize(("header_bytes", "payload_bytes"), [(0, 1 << 40), (0xFFFFFFFF, 0), (0, 100), (3, 0), (0, 0)])
@pytest.mark.parametrize("status", [0, 1])
def test_a_forged_frame_fails_the_submission_alone(
    session: Session, header_bytes: int, payload_bytes: int, status: int
):
    options = {"header_bytes": header_bytes, "payload_bytes": payload_bytes, "status": status}
    raised = failure(session, "forge_frame", 1, **options)
    assert raised.status == "crashed"
    assert "rank 0 handed back a broken result" in raised.message


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x04K\x01.",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        save({"x": torch.ones(4)})[:-1],
        save({"x": torch.ones(4, dtype=torch.bool)}),
    ],
)
def test_a_payload_that_is_no_allowed_safetensors_fails_the_submission_alone(session: Session, payload: bytes):
    raised = failure(session, "forge_payload", 1, payload=payload.hex())
    assert raised.status == "crashed"
    assert "broken result" in raised.message


def test_a_rank_cannot_make_its_failure_look_like_ours(session: Session):
    assert failure(session, "forge_setup_error").status == "crashed"


def test_bytes_after_the_result_cannot_change_it(session: Session):
    for result in call(session, "write_after_the_result", 2):
        assert result.tensors["x"].tolist() == [1]


def test_a_rank_that_runs_out_of_memory_is_named(session: Session):
    raised = failure(session, "allocate_without_end")
    assert raised.status == "out_of_memory"
    assert raised.message.startswith("rank 1 raised ")


@pytest.mark.parametrize("what", ["list", "list in dict", "sparse", "meta", "nan value"])
def test_what_is_no_plain_tensor_is_refused_with_its_kind(session: Session, what: str):
    raised = failure(session, "hand_back_other_things", 1, what=what)
    assert raised.status == "crashed"
    assert re.search("expected|JSON", raised.message)


def test_a_function_that_is_missing_names_it(session: Session):
    assert "no_such_behaviour" in failure(session, "no_such_behaviour").message


def test_starting_four_ranks_costs_a_fraction_of_a_second(session: Session):
    call(session, "all_reduce", 4)
    times = []
    for _ in range(5):
        started = time.monotonic()
        call(session, "all_reduce", 4)
        times.append(time.monotonic() - started)
    assert min(times) < 1.0, times


def test_an_agent_that_dies_is_our_failure_not_the_students():
    sandbox = PlainSandbox()
    client = AgentClient.start(sandbox, student_files(), sys.executable, own_users=False, needs_torch=True)
    with Session(client) as session:
        client.warm()
        sandbox.processes[0].kill()
        with pytest.raises(InfrastructureError, match="the agent in the local sandbox failed"):
            call(session, "all_reduce")
