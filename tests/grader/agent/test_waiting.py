import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from grader.agent.waiting import Slot, Standstill, describe

WAITING = {"state": "waiting", "operation": "recv", "peer": 0}


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def worker() -> Iterator[int]:
    code = "import time\nwhile True:\n sum(range(1_000_000))\n time.sleep(0.02)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        time.sleep(0.3)
        yield process.pid
        process.kill()


def waiting_slot() -> Slot:
    slot = Slot()
    slot.write(WAITING)
    return slot


def stands_still(ranks: list[tuple[int, Slot]], seconds: float = 2.0, between=lambda: None) -> bool:
    standstill = Standstill()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if standstill.seen(ranks):
            return True
        between()
        time.sleep(0.05)
    return False


def test_ranks_that_all_sleep_in_a_communication_stand_still(sleeper: int):
    started = time.monotonic()
    assert stands_still([(sleeper, waiting_slot()), (sleeper, waiting_slot())])
    assert 0.7 < time.monotonic() - started < 10


def test_one_rank_that_does_not_wait_is_enough_to_go_on(sleeper: int):
    assert not stands_still([(sleeper, waiting_slot()), (sleeper, Slot())])


def test_a_rank_that_uses_the_processor_does_not_stand_still(sleeper: int, worker: int):
    assert not stands_still([(sleeper, waiting_slot()), (worker, waiting_slot())])


def test_a_new_communication_starts_the_clock_again(sleeper: int):
    slot = waiting_slot()
    assert not stands_still([(sleeper, slot)], between=lambda: slot.write(WAITING))


def test_a_note_crosses_the_fork_and_is_seen_by_the_agent():
    slot = Slot()
    pid = os.fork()
    if pid == 0:
        slot.write({"state": "waiting", "operation": "barrier"})
        os._exit(0)
    os.waitpid(pid, 0)
    assert slot.read() == {"state": "waiting", "operation": "barrier"}
    assert slot.sequence() == 1


@pytest.mark.parametrize(
    "junk",
    [b"", b"\xff" * 4096, b"\x01" * 12 + b"[1]", b"\0" * 8 + b"\x02\0\0\0{}", b"\0" * 8 + b"\xff\0\0\0" + b"[" * 255],
)
def test_junk_in_a_slot_is_no_note(junk: bytes):
    slot = Slot()
    slot._memory[: len(junk)] = junk
    assert slot.read() == {}


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ({}, ""),
        ({"state": "running", "operation": "recv", "peer": 1}, ""),
        ({"state": "waiting", "operation": "recv", "peer": 1}, "to receive from rank 1"),
        ({"state": "waiting", "operation": "send", "peer": 1, "where": "a.py:3"}, "to send to rank 1 (a.py:3)"),
        ({"state": "waiting", "operation": "all_reduce", "ranks": [0, 2]}, "in the all_reduce of ranks 0, 2"),
        (
            {"state": "waiting", "operation": "broadcast", "ranks": [0, 2], "peer": 2},
            "in the broadcast of ranks 0, 2 with root 2",
        ),
        ({"state": "waiting", "operation": "new_group"}, "for all ranks to make a new group"),
        ({"state": "waiting", "operation": "barrier", "ranks": list(range(100))}, None),
        ({"state": "waiting", "operation": ["x"] * 1000, "where": {"a": "b" * 1000}, "ranks": ["y" * 99]}, None),
    ],
)
def test_a_note_is_described_in_words_and_never_at_length(note: dict, expected: str | None):
    said = describe(note)
    assert said == expected if expected is not None else len(said) < 300
