"""The manifest says what the course's page says, and every check that it announces has a test."""

from pathlib import Path

import pathspec
import pytest

import assignments
from assignments.tinyinfinitrain.tests import (
    tasks,
    test_adam,
    test_dispatcher,
    test_elementwise,
    test_gpt2,
    test_matmul,
    test_tensor,
    test_text,
)
from grader.assignment.manifest import Manifest, load

FOLDER = Path(next(iter(assignments.__path__))) / "tinyinfinitrain"
MODULES = (test_adam, test_dispatcher, test_elementwise, test_gpt2, test_matmul, test_tensor, test_text)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return load(FOLDER)


def test_items_have_upstreams_points(manifest: Manifest) -> None:
    points = {item.id: item.points for item in manifest.items}
    expected = dict(elementwise=5, matmul=5, matmul_cuda=10, adam=5, adam_cuda=10, tensor=10, dispatcher=20, gpt2=35)
    assert points == expected


def test_a_cpu_runner_can_award_80_points(manifest: Manifest) -> None:
    assert sum(item.points for item in manifest.items if not item.needs) == 80


def test_announced_checks_are_those_that_tests_claim(manifest: Manifest) -> None:
    announced = {(item.id, check.id) for item in manifest.items for check in item.checks}
    claimed = {
        (mark.kwargs["item"], mark.kwargs["id"])
        for module in MODULES
        for name, test in vars(module).items()
        if name.startswith("test_")
        for mark in test.pytestmark
        if mark.name == "check"
    }
    assert claimed == announced


def test_checks_of_an_item_on_both_devices_come_in_pairs(manifest: Manifest) -> None:
    checks = {check.id: check.device for check in manifest.item("gpt2").checks}
    on_cpu = {check for check, device in checks.items() if device == "cpu"}
    assert {f"{check}_cuda" for check in on_cpu} == {check for check, device in checks.items() if device == "cuda"}


@pytest.mark.parametrize(
    ("path", "exported"),
    [
        ("infini_train/include/tensor.h", True),
        ("infini_train/src/kernels/cuda/linear.cu", True),
        ("example/gpt2/net.cc", True),
        ("test/kernels/test_matmul.cc", True),
        ("CMakeLists.txt", True),
        ("example/gpt2_logits_reference.bin", False),
        ("Data/gpt2_124M.bin", False),
        ("docs/report.md", False),
        ("docs/screenshot.png", False),
        ("third_party/glog", False),
        ("build/CMakeLists.txt", False),
        (".vscode/settings.json", False),
    ],
)
def test_export_takes_sources_and_nothing_else(manifest: Manifest, path: str, exported: bool) -> None:
    patterns = pathspec.GitIgnoreSpec.from_lines(manifest.policy.export)
    assert patterns.match_file(path) is exported


def test_every_file_of_a_task_is_editable(manifest: Manifest) -> None:
    patterns = pathspec.GitIgnoreSpec.from_lines(manifest.policy.editable)
    listed = [value for value in vars(tasks).values() if isinstance(value, tasks.Task)]
    listed += [*tasks.MATMUL.values(), *tasks.ADAM.values()]
    for task in listed:
        assert patterns.match_file(task.where) or task is tasks.GPT2, task
