"""What every sandbox promises, asked of both kinds."""

import contextlib
import os
import time
import uuid
from pathlib import Path

import docker
import psutil
import pytest

from grader.errors import SandboxError
from grader.sandbox import open_sandbox
from grader.sandbox.base import Ending
from grader.sandbox.owner import LABEL
from tests.grader.sandbox.conftest import LIMITS, make_specification


def shell(sandbox, script, timeout_s=20.0, **options):
    return sandbox.run(["sh", "-c", script], timeout_s=timeout_s, **options)


def processes_named(word):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if word in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_program_ends_with_its_own_exit_code_and_streams_apart(sandbox):
    finished = shell(sandbox, "echo out; echo err >&2; exit 3")
    assert (finished.ending, finished.exit_code) == (Ending.EXITED, 3)
    assert (finished.stdout, finished.stderr, finished.truncated) == ("out\n", "err\n", False)


def test_program_that_a_signal_ends_is_told_from_one_that_exits(sandbox):
    finished = shell(sandbox, "kill -SEGV $$")
    assert (finished.ending, finished.exit_code) == (Ending.KILLED, -11)


def test_standard_input_arrives_whole_and_ends(sandbox):
    data = os.urandom(300_000)
    assert shell(sandbox, "wc -c", stdin=data).stdout.split()[0] == "300000"


def test_files_go_in_and_come_back_byte_for_byte(sandbox):
    files = {"deep/er/数据.bin": bytes(range(256)) * 40, "empty": b""}
    sandbox.put(files)
    assert sandbox.get("deep", max_bytes=1 << 20) == {"deep/er/数据.bin": files["deep/er/数据.bin"]}
    assert sandbox.get("empty", max_bytes=0) == {"empty": b""}
    assert sandbox.get("nothing", max_bytes=10) == {}


def test_executable_files_can_be_run(sandbox):
    sandbox.put({"program": b"#!/bin/sh\necho ran in $(pwd)\n", "other": b"#!/bin/sh\n"}, executable={"program"})
    finished = sandbox.run([f"{sandbox.root}/program"], timeout_s=20, cwd=".")
    assert finished.stdout == f"ran in {sandbox.root}\n"
    assert shell(sandbox, "test ! -x other").exit_code == 0


def test_links_and_special_files_do_not_come_out(sandbox):
    shell(sandbox, "mkdir out && cd out && ln -s /etc/passwd link && mkfifo pipe && echo kept > file")
    assert sandbox.get("out", max_bytes=1 << 20) == {"out/file": b"kept\n"}
    assert sandbox.get("out/link", max_bytes=1 << 20) == {}


def test_more_than_the_cap_is_refused_and_never_cut_in_silence(sandbox):
    shell(sandbox, "head -c 5000 /dev/zero > big")
    with pytest.raises(SandboxError):
        sandbox.get("big", max_bytes=4999)
    assert len(sandbox.get("big", max_bytes=5000)["big"]) == 5000


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b"])
def test_paths_that_lead_out_are_refused(sandbox, path):
    with pytest.raises(SandboxError):
        sandbox.put({path: b"x"})
    with pytest.raises(SandboxError):
        sandbox.get(path, max_bytes=10)


def test_timeout_ends_the_program_and_keeps_what_it_printed(sandbox):
    finished = shell(sandbox, "echo before; trap '' TERM INT HUP; while :; do sleep 1; done", timeout_s=1.5)
    assert (finished.ending, finished.exit_code, finished.stdout) == (Ending.TIMEOUT, None, "before\n")
    assert finished.duration_s < 10


def test_processes_that_hide_from_their_group_do_not_outlive_the_program(sandbox):
    mark = f"30{uuid.uuid4().int % 10**9}"
    shell(sandbox, f"(setsid sleep {mark} >/dev/null 2>&1 </dev/null &) ; sleep 0.2")
    time.sleep(0.3)
    assert processes_named(mark) == []


def test_endless_output_is_capped_counted_and_decoded(sandbox):
    finished = shell(sandbox, "printf '\\377\\376ok'; yes | tr -d '\\n'", timeout_s=1.5)
    assert finished.ending is Ending.TIMEOUT
    assert finished.truncated
    assert finished.stdout.startswith("\ufffd\ufffdok")
    assert len(finished.stdout) < 2 * LIMITS.log_bytes
    assert "more bytes were dropped" in finished.stdout


def test_our_environment_does_not_reach_the_program(kind, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_OURS", "hush")
    with open_sandbox(kind, make_specification(kind)) as sandbox:
        assert "hush" not in shell(sandbox, "env").stdout


def test_environment_of_the_call_reaches_the_program(sandbox):
    assert shell(sandbox, "echo $COURSE", environment={"COURSE": "训练营"}).stdout == "训练营\n"


def test_conversation_with_a_program_that_answers(sandbox):
    process = sandbox.start(["sh", "-c", "while read word; do echo got $word; done; echo over >&2"])
    process.stdin.write(b"one\n")
    process.stdin.flush()
    assert process.stdout.read(8) == b"got one\n"
    process.stdin.close()
    finished = process.wait(20)
    assert (finished.ending, finished.exit_code, finished.stderr) == (Ending.EXITED, 0, "over\n")


def test_killed_conversation_ends_for_the_reader(sandbox):
    process = sandbox.start(["sh", "-c", "trap '' TERM; echo ready; sleep 1000"])
    assert process.stdout.read(6) == b"ready\n"
    process.kill()
    assert process.stdout.read(1) == b""


def test_program_that_is_not_there_does_not_count_as_run(kind, sandbox):
    if kind == "local":
        with pytest.raises(SandboxError, match="no-such-program"):
            sandbox.run(["no-such-program"], timeout_s=20)
    else:
        assert sandbox.run(["no-such-program"], timeout_s=20).exit_code in {126, 127}


def test_nothing_is_left_after_closing(kind):
    with open_sandbox(kind, make_specification(kind, label="left-behind")) as sandbox:
        folder = Path(str(sandbox.root))
        sandbox.put({"file": b"x"})
        sandbox.start(["sleep", "9871"])
    assert processes_named("sleep 9871") == []
    if kind == "local":
        assert not folder.exists()
    else:
        client = docker.APIClient()
        assert client.containers(all=True, filters={"label": f"{LABEL}=left-behind"}) == []
        client.close()


def test_closing_twice_is_harmless(kind):
    sandbox = open_sandbox(kind, make_specification(kind))
    sandbox.close()
    sandbox.close()
