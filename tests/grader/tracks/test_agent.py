import os
import sys
import time
from collections.abc import Iterator

import pytest

from grader import wire
from grader.errors import InfrastructureError
from grader.tracks.agent import AgentClient, Command, CommandFinished, ProgramLimits
from tests.grader.tracks.plain import PlainSandbox

# An interpreter that every user of this machine can start.
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
MEBIBYTE = 1 << 20
USERS = ["one user", *(["own users"] if os.geteuid() == 0 else [])]


@pytest.fixture(scope="module", params=USERS)
def client(request: pytest.FixtureRequest) -> Iterator[AgentClient]:
    own = request.param == "own users"
    with AgentClient.start(PlainSandbox(), {}, sys.executable, own_users=own) as opened:
        yield opened


def python(client: AgentClient, code: str, timeout_s: float = 20.0, **options) -> CommandFinished:
    return client.run_command(Command(argv=[PYTHON, "-I", "-c", code], timeout_s=timeout_s, **options))


def shell(client: AgentClient, code: str, timeout_s: float = 20.0, **options) -> CommandFinished:
    return client.run_command(Command(argv=["/bin/sh", "-c", code], timeout_s=timeout_s, **options))


def test_a_program_gets_its_inputs_and_its_outputs_come_back(client: AgentClient):
    finished = shell(
        client,
        "cat one two > both; echo said; echo wrong >&2; exit 3",
        inputs={"one": b"\x00first", "two": b"second" * 100_000},
        outputs=["both", "missing"],
    )
    assert (finished.ending, finished.exit_code) == ("exited", 3)
    assert finished.outputs == {"both": b"\x00first" + b"second" * 100_000}
    assert (finished.stdout, finished.stderr) == ("said\n", "wrong\n")
    assert not finished.truncated


def test_the_private_folder_is_the_working_folder_and_gone_afterwards(client: AgentClient):
    finished = client.run_command(
        Command(
            argv=["/bin/sh", "-c", 'pwd; echo "$0 $WHERE $HOME $TMPDIR"', "{case}"],
            timeout_s=20,
            environment={"WHERE": "{case}/x"},
        )
    )
    folder, rest = finished.stdout.splitlines()
    assert rest == f"{folder} {folder}/x {folder} {folder}"
    shell(client, "true")
    assert not os.path.exists(folder)


def test_the_environment_is_only_what_was_asked_for(client: AgentClient):
    finished = python(client, "import os; print(sorted(os.environ))", environment={"A": "1"})
    assert set(finished.stdout.strip("[]\n").replace("'", "").split(", ")) <= {"A", "HOME", "TMPDIR", "LC_CTYPE"}


def test_a_signal_is_told_from_an_exit_code(client: AgentClient):
    finished = shell(client, "kill -SEGV $$")
    assert (finished.ending, finished.exit_code) == ("killed", -11)


def test_a_program_over_its_time_is_ended_with_all_that_it_started(client: AgentClient):
    code = "trap '' TERM; (setsid sleep 1000 >/dev/null 2>&1 & echo $!); echo before; sleep 1000"
    started = time.monotonic()
    finished = shell(client, code, timeout_s=0.7)
    assert time.monotonic() - started < 5
    assert (finished.ending, finished.exit_code) == ("timeout", None)
    pid, before = finished.stdout.splitlines()
    assert before == "before"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_daemons_of_a_program_that_ends_are_ended_too(client: AgentClient):
    finished = shell(client, "(setsid sleep 1000 & echo $!)")
    with pytest.raises(ProcessLookupError):
        os.kill(int(finished.stdout), 0)


@pytest.mark.parametrize(
    "make",
    ["ln -s /etc/passwd out", "mkfifo out", "mkdir out", "ln -s /dev/zero out", "truncate -s 100M out"],
)
def test_an_output_that_is_no_small_regular_file_is_refused_with_the_reason(client: AgentClient, make: str):
    finished = shell(client, f"{make}; echo fine > other", outputs=["out", "other"], max_output_bytes=MEBIBYTE)
    assert finished.outputs == {"other": b"fine\n"}
    assert list(finished.refused) == ["out"]


def test_a_folder_that_became_a_link_is_not_followed(client: AgentClient):
    code = "cd ..; mv own away && mkdir elsewhere && echo secret > elsewhere/out && ln -s elsewhere own"
    assert shell(client, code, outputs=["out"]).outputs == {}
    assert shell(client, "echo still here").stdout == "still here\n"


def test_endless_output_is_capped_and_keeps_its_beginning_and_end(client: AgentClient):
    code = "import os\nprint('first', flush=True)\nfor _ in range(1000): os.write(1, b'\\xff' * 100_000)\nprint('last')"
    finished = python(client, code, limits=ProgramLimits(log_bytes=10_000))
    assert finished.truncated
    assert finished.stdout.startswith("first\n\ufffd")
    assert finished.stdout.endswith("last\n")
    assert len(finished.stdout) < 11_000


def test_memory_over_the_limit_cannot_be_had(client: AgentClient):
    limits = ProgramLimits(memory_bytes=256 * MEBIBYTE)
    assert "MemoryError" in python(client, "x = bytearray(1 << 30)", limits=limits).stderr
    assert python(client, "x = bytearray(1 << 26)", limits=limits).exit_code == 0


def test_a_file_over_its_limit_cannot_be_written(client: AgentClient):
    finished = python(client, "open('out', 'wb').write(bytes(1 << 21))", limits=ProgramLimits(file_bytes=MEBIBYTE))
    assert finished.exit_code != 0


def test_a_program_inherits_no_descriptor_beyond_the_standard_three(client: AgentClient):
    code = "import os\nfor n in range(3, 1024):\n try: print(n, os.fstat(n))\n except OSError: pass"
    assert python(client, code).stdout == ""


def test_a_program_that_is_not_there_is_our_failure_and_the_next_one_runs(client: AgentClient):
    with pytest.raises(InfrastructureError, match=r"'/no such program' could not be started: .*No such file"):
        client.run_command(Command(argv=["/no such program"], timeout_s=5))
    assert shell(client, "echo still here").stdout == "still here\n"


def test_an_agent_that_does_not_start_is_our_failure():
    with pytest.raises(InfrastructureError, match="agent"):
        AgentClient.start(PlainSandbox(), {}, "/bin/false", own_users=False)


@pytest.mark.parametrize("said", [b"", b"nonsense", b"TIG1\x02\x00\x00\x00", wire.encode(wire.Frame({"kind": "x"}))])
def test_an_agent_that_babbles_is_our_failure(said: bytes, tmp_path):
    script = tmp_path / "agent"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.stdout.buffer.write({said!r})\n")
    script.chmod(0o755)
    with pytest.raises(InfrastructureError, match="agent"):
        AgentClient.start(PlainSandbox(), {}, str(script), own_users=False)


@pytest.mark.parametrize("name", ["../out", "a/b", "..", "", "a\0b"])
def test_an_output_is_named_by_a_plain_name_alone(name: str):
    with (
        AgentClient.start(PlainSandbox(), {}, sys.executable, own_users=False) as client,
        pytest.raises(InfrastructureError, match="plain name"),
    ):
        shell(client, "true", outputs=[name])


@pytest.fixture(scope="module", params=USERS[1:])
def own(request: pytest.FixtureRequest) -> Iterator[AgentClient]:
    with AgentClient.start(PlainSandbox(), {}, sys.executable, own_users=True) as opened:
        yield opened


class TestOwnUsers:
    def test_a_program_runs_as_a_user_without_any_privilege(self, own: AgentClient):
        finished = shell(own, "id -u; id -G; grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs' /proc/self/status")
        user, groups, *status = finished.stdout.splitlines()
        assert int(user) > 100_000
        assert groups == user
        fields = dict(line.split(":\t") for line in status)
        assert fields.pop("NoNewPrivs") == "1"
        assert {value for name, value in fields.items()} == {"0" * 16}

    def test_programs_of_different_numbers_are_different_users(self, own: AgentClient):
        assert len({shell(own, "id -u", user=number).stdout for number in (0, 0, 1, 2)}) == 3

    def test_a_program_cannot_reach_the_agent_or_the_folder_of_all_cases(self, own: AgentClient):
        code = "kill -9 $PPID; cat /proc/$PPID/environ; ls ..; ls ../..; touch ../beside; exit 0"
        finished = shell(own, code)
        assert finished.stdout == ""
        assert finished.stderr.count("ermitted") + finished.stderr.count("denied") == 5
        assert shell(own, "echo still here").stdout == "still here\n"

    def test_a_fork_bomb_is_held_and_the_next_program_runs(self, own: AgentClient):
        finished = shell(own, "b() { b | b & b; }; b", timeout_s=1.5)
        assert finished.duration_s < 5
        assert shell(own, "echo fine").stdout == "fine\n"
