"""The probes' own headers, compiled in the build image: files go round, and a crash costs one case."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

import assignments
from assignments.tinyinfinitrain.tests import cases
from grader import images
from grader.sandbox import open_sandbox
from grader.sandbox.base import Ending, Sandbox, Specification
from grader.tracks.cpp.probe import pack

pytestmark = pytest.mark.docker

PROBES = Path(next(iter(assignments.__path__))) / "tinyinfinitrain" / "probes"
PROGRAM = r"""
#include "cases.h"
#include <stdexcept>

static void Run(probe::Case &one) {
    for (const char *name : {"f", "i", "scalar", "empty", "bytes"}) {
        if (one.Has(name)) one.Save(name, one.Input(name));
    }
    one.Keep();
    std::cout << "printed " << one.name << std::flush;
    std::cerr << "log of " << one.name << std::endl;
    if (one.name == "aborts") std::abort();
    if (one.name == "exits") std::exit(3);
    if (one.name == "throws") throw std::runtime_error("why it threw");
    if (one.name == "crashes") *reinterpret_cast<volatile int *>(8) = 1;
    if (one.name == "garbles") {
        std::ofstream(one.arguments.Path("garbles.case"), std::ios::binary) << "\xff\xff\xff\xff\xff\xff\xff\x7f{}";
        _exit(0);
    }
    one.Save("after", probe::Numbers<int64_t>("I64", {one.arguments.Number("after", 0)}));
}

int main(int argc, char **argv) { return probe::Main(argc, argv, {{"run", Run}}); }
"""
INPUTS = {
    "f": torch.tensor([[1.5, -2.0], [3.25, 0.0]]),
    "i": torch.tensor([1, -(2**40)]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "bytes": torch.tensor([0, 255, 34], dtype=torch.uint8),
}
NAMES = ("ends", "aborts", "exits", "throws", "crashes", "garbles")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox("docker", Specification(image=images.require("cpp"), label="tests")) as opened:
        headers = {name: (PROBES / name).read_bytes() for name in ("cases.h", "tensor_file.h")}
        opened.put({**headers, "program.cc": PROGRAM.encode()})
        built = opened.run(["g++", "-std=c++20", "-Wall", "-Wextra", "program.cc", "-o", "program"], timeout_s=120)
        assert built.exit_code == 0, built.stderr
        assert "warning" not in built.stderr
        yield opened


@pytest.fixture(scope="module")
def outcomes(sandbox: Sandbox) -> dict[str, cases.Outcome]:
    class Program:
        def probe(self, name: str, inputs: dict, arguments: dict) -> dict[str, torch.Tensor]:
            sandbox.put({f"case/{file}": data for file, data in pack(inputs).items()})
            words = [f"{key}={value}" for key, value in arguments.items()]
            finished = sandbox.run(["./program", "case", *words], timeout_s=60)
            assert (finished.ending, finished.exit_code) == (Ending.EXITED, 0), finished.stderr
            return safetensors.torch.load(sandbox.get("case/outputs.safetensors", max_bytes=1 << 20).popitem()[1])

    return cases.run(Program(), "program", "run", {name: INPUTS for name in NAMES}, arguments={"after": 17})


def test_tensors_of_every_shape_and_type_go_round(outcomes: dict[str, cases.Outcome]):
    found = outcomes["ends"]
    assert found.status == 0
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items() if name != "after"} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in INPUTS.items()
    }
    assert all(torch.equal(found.tensors[name], INPUTS[name]) for name in INPUTS)


def test_arguments_are_read(outcomes: dict[str, cases.Outcome]):
    assert outcomes["ends"].number("after") == 17


@pytest.mark.parametrize(("name", "status"), [("aborts", -6), ("exits", 3), ("throws", 70), ("crashes", -11)])
def test_a_case_that_ends_early_keeps_what_it_had_and_says_how_it_ended(
    outcomes: dict[str, cases.Outcome], name: str, status: int
):
    found = outcomes[name]
    assert found.status == status
    assert torch.equal(found.tensors["f"], INPUTS["f"])
    assert found.number("after") is None


def test_what_a_case_prints_is_its_own(outcomes: dict[str, cases.Outcome]):
    assert {name: outcome.printed for name, outcome in outcomes.items()} == {
        name: f"printed {name}".encode() for name in NAMES
    }
    assert outcomes["throws"].reason == "uncaught exception: why it threw"


def test_a_file_with_a_lying_header_costs_its_own_case_alone(outcomes: dict[str, cases.Outcome]):
    assert outcomes["garbles"].status == 0
    assert outcomes["garbles"].tensors == {}
