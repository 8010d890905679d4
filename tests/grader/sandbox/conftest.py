import pytest

from grader import images
from grader.sandbox import open_sandbox
from grader.sandbox.base import MEBIBYTE, Limits, Specification

LIMITS = Limits(
    memory_bytes=256 * MEBIBYTE,
    scratch_bytes=32 * MEBIBYTE,
    shared_memory_bytes=16 * MEBIBYTE,
    file_bytes=8 * MEBIBYTE,
    processes=64,
    log_bytes=64 << 10,
)


def make_specification(kind, **changes):
    image = images.require("cpp-run") if kind == "docker" else ""
    return Specification(**{"image": image, "limits": LIMITS, "label": "conformance", **changes})


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def kind(request):
    return request.param


@pytest.fixture
def sandbox(kind):
    with open_sandbox(kind, make_specification(kind)) as opened:
        yield opened
