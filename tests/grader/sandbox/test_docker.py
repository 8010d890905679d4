"""What isolation means, tried from inside."""

import os
import subprocess
import sys
import textwrap

import docker
import pytest

from grader.errors import SandboxError
from grader.sandbox import open_sandbox, owner
from grader.sandbox.base import Ending, Limits, Specification
from grader.sandbox.docker import host_options
from tests.grader.sandbox.conftest import make_specification

pytestmark = pytest.mark.docker


@pytest.fixture
def sandbox():
    with open_sandbox("docker", make_specification("docker")) as opened:
        yield opened


def shell(sandbox, script, timeout_s=30.0):
    return sandbox.run(["sh", "-c", script], timeout_s=timeout_s)


def test_program_is_nobody_and_holds_no_capability(sandbox):
    out = shell(sandbox, "id -u; grep -E 'CapEff|CapPrm|CapInh|CapAmb|NoNewPrivs|Seccomp:' /proc/self/status").stdout
    assert out.startswith("10000\n")
    values = dict(line.split(":\t") for line in out.splitlines()[1:])
    assert {values[name] for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}
    assert (values["NoNewPrivs"], values["Seccomp"]) == ("1", "2")


def test_there_is_no_network(sandbox):
    assert shell(sandbox, "cat /proc/net/dev").stdout.count("lo:") == 1
    assert "eth" not in shell(sandbox, "cat /proc/net/dev").stdout


def test_root_file_system_is_read_only(sandbox):
    for place in ("/", "/usr/bin", "/etc", "/opt", "/var/tmp", "/root"):
        assert shell(sandbox, f"touch {place}/x").exit_code != 0


def test_guard_that_can_end_every_program_cannot_be_ended(sandbox):
    shell(sandbox, "kill -9 1; kill -9 -1; kill -STOP 1")
    assert shell(sandbox, "echo alive").stdout == "alive\n"


def test_fork_bomb_is_held(sandbox):
    finished = shell(sandbox, "bomb() { bomb | bomb & }; bomb; sleep 100", timeout_s=3)
    assert "fork" in finished.stderr.lower()
    assert shell(sandbox, "echo alive").stdout == "alive\n"


def test_memory_hog_is_named_as_such(sandbox):
    finished = shell(sandbox, "tail /dev/zero")
    assert finished.ending is Ending.OUT_OF_MEMORY
    assert shell(sandbox, "echo alive").stdout == "alive\n"


@pytest.mark.parametrize("place", ["/work", "/tmp", "/dev/shm"])
def test_disk_filler_fills_its_own_small_space(sandbox, place):
    finished = shell(
        sandbox, f"cd {place}; for i in 1 2 3 4 5 6 7 8 9; do head -c 8000000 /dev/zero > f$i; done; du -sk ."
    )
    assert "No space left" in finished.stderr
    assert int(finished.stdout.split()[0]) <= 33_000


def test_file_over_its_cap_ends_the_writer(sandbox):
    finished = shell(sandbox, "exec head -c 20000000 /dev/zero > big")
    assert (finished.ending, finished.exit_code) == (Ending.KILLED, -25)


def test_missing_image_says_how_to_get_it():
    with pytest.raises(SandboxError) as caught:
        open_sandbox("docker", Specification(image="tinyinfinitrain/none:0"))
    assert "tinyinfinitrain/none:0" in caught.value.what
    assert "grader images build" in caught.value.advice


def test_gpus_are_asked_of_the_engine():
    (request,) = host_options(Specification(gpus=2))["device_requests"]
    assert (request["Count"], request["Capabilities"]) == (2, [["gpu"]])
    assert host_options(Specification())["device_requests"] == []


def test_more_processors_than_the_machine_has_are_cut_to_what_there_are():
    with open_sandbox("docker", make_specification("docker", limits=Limits(cpus=4096.0))) as sandbox:
        assert shell(sandbox, "true").exit_code == 0


def test_reaper_removes_what_a_killed_grader_left_and_nothing_else():
    script = textwrap.dedent("""
        import os, signal, sys
        from grader.sandbox import open_sandbox
        from tests.grader.sandbox.conftest import make_specification
        open_sandbox("docker", make_specification("docker", label="orphan"))
        print("made", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    client = docker.APIClient()
    orphans = {"label": f"{owner.LABEL}=orphan"}
    with open_sandbox("docker", make_specification("docker", label="mine")) as mine:
        assert len(client.containers(all=True, filters=orphans)) == 1
        assert owner.reap() >= 1
        assert client.containers(all=True, filters=orphans) == []
        assert mine.run(["true"], timeout_s=20).exit_code == 0
    client.close()
