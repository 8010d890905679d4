import sys
from collections.abc import Iterator, Mapping

import pytest
import torch

from grader.errors import InfrastructureError
from grader.tracks.agent import AgentClient, CommandFinished, SubmissionFailure
from grader.tracks.cpp.probe import pack, run_probe, unpack
from tests.grader.tracks.plain import PlainSandbox

START = f"#!{sys.executable} -I\nimport os, signal, sys, time\nfolder, *words = sys.argv[1:]\nos.chdir(folder)\n"
ECHO = "os.rename('inputs.safetensors', 'outputs.safetensors')\n"
PROGRAMS = {
    "echo": ECHO,
    "words": "open('outputs.safetensors', 'wb').write(bytes(words[0].split('=')[1], 'ascii'))\n",
    "file": "os.rename('model.bin', 'outputs.safetensors')\n",
    "aborts": "os.kill(os.getpid(), signal.SIGABRT)\n",
    "exits": "print('why it ended', file=sys.stderr)\nsys.exit(3)\n",
    "early": ECHO + "sys.exit(3)\n",
    "silent": 'print(\'{"status": "passed"}\')\n',
    "pickle": "open('outputs.safetensors', 'wb').write(b'\\x80\\x04K\\x01.' * 100)\n",
    "truncated": "data = open('inputs.safetensors', 'rb').read()\nopen('outputs.safetensors', 'wb').write(data[:-1])\n",
    "link": "os.symlink('/etc/passwd', 'outputs.safetensors')\n",
    "large": "open('outputs.safetensors', 'wb').write(bytes(4097))\n",
    "sleeps": "time.sleep(60)\n",
}
TENSORS = {"a/x": torch.tensor([1.5, -2.0]), "a/empty": torch.zeros(0, 3), "b/scalar": torch.tensor(7)}


@pytest.fixture(scope="module")
def client() -> Iterator[AgentClient]:
    files = {f"bin/probe_{name}": (START + code).encode() for name, code in PROGRAMS.items()}
    with AgentClient.start(PlainSandbox(), files, sys.executable, own_users=False) as opened:
        yield opened


def same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def test_tensors_go_in_and_come_out_by_name(client: AgentClient):
    assert same(run_probe(client, "echo", TENSORS, {}), TENSORS)


def test_tensors_that_share_memory_and_that_are_not_contiguous_go_in(client: AgentClient):
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"whole": whole, "again": whole, "transposed": whole.T, "row": whole[1]}
    assert same(run_probe(client, "echo", tensors, {}), tensors)


def test_bytes_become_a_file_of_that_name(client: AgentClient):
    content = pack(TENSORS)["inputs.safetensors"]
    assert same(run_probe(client, "file", {"model.bin": content}, {}), TENSORS)


def test_arguments_reach_the_program_as_words(client: AgentClient):
    with pytest.raises(SubmissionFailure, match="no safetensors"):
        run_probe(client, "words", {}, {"device": "cpu"})


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("aborts", "crashed", "signal 6"),
        ("exits", "crashed", "exit code 3"),
        ("early", "crashed", "exit code 3"),
        ("silent", "failed", "without outputs"),
        ("pickle", "failed", "no safetensors"),
        ("truncated", "failed", "no safetensors"),
        ("link", "failed", "without outputs"),
        ("large", "failed", "4096 were left"),
    ],
)
def test_a_program_that_hands_nothing_usable_back_is_the_submissions_failure(
    client: AgentClient, name: str, status: str, words: str
):
    with pytest.raises(SubmissionFailure, match=words) as caught:
        run_probe(client, name, TENSORS, {}, max_output_bytes=4096)
    assert caught.value.status == status
    assert f"probe {name}" in caught.value.message


def test_the_log_of_a_program_that_ended_early_is_kept(client: AgentClient):
    with pytest.raises(SubmissionFailure) as caught:
        run_probe(client, "exits", TENSORS, {})
    assert "why it ended" in caught.value.details["log"]


def test_a_program_over_its_time_is_a_timeout(client: AgentClient):
    with pytest.raises(SubmissionFailure) as caught:
        run_probe(client, "sleeps", TENSORS, {}, timeout_s=0.5)
    assert caught.value.status == "timeout"


@pytest.mark.parametrize("code", [1, 64, 77, 255])
def test_no_exit_code_passes_for_our_own_failure(code: int):
    finished = CommandFinished(
        ending="exited", exit_code=code, duration_s=0.0, stdout="", stderr="", truncated=False, peak_bytes=0,
        out_of_memory=False, outputs=pack(TENSORS), refused={},
    )  # fmt: skip
    with pytest.raises(SubmissionFailure, match=f"exit code {code}"):
        unpack("x", finished)


def test_a_dtype_that_torch_hardly_knows_is_refused(client: AgentClient):
    with pytest.raises(SubmissionFailure, match="float8"):
        run_probe(client, "echo", {"x": torch.zeros(2).to(torch.float8_e4m3fn)}, {})


@pytest.mark.parametrize("name", ["../model.bin", "a/b", "inputs.safetensors", "outputs.safetensors", ""])
def test_a_file_whose_name_is_a_path_or_the_protocols_own_is_refused(name: str):
    with pytest.raises(InfrastructureError, match="plain name"):
        pack({name: b"x"})
