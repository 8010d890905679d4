"""A starter keeps what a student needs to read and nothing of what a student is to write."""

import ast
from pathlib import Path

import pytest

from grader.assignment.manifest import Manifest
from grader.assignment.starter import blank, given_files, starter
from grader.errors import InfrastructureError

SOURCE = '''"""A module."""

import functools

_TABLE = {1: 2}  # belongs to the solution
_LIMIT: int = 7
_KEPT = 3


class Ring:
    """A ring."""

    size: int = 4

    def __init__(self, size: int = _KEPT) -> None:
        """Make it."""
        self.size = size

    @functools.cached_property
    def double(self) -> int:
        return _helper(self.size)

    def _secret(self) -> int:
        return 42


def reduce(values: list[int], *, start: int = 0) -> int:
    """Add them up.

    Args:
        values: What to add.
    """
    return _helper(sum(values) + start) + _LIMIT


def untouched() -> int:
    return _also_used() + _KEPT


def _helper(value: int) -> int:
    return _deeper(value)


def _deeper(value: int) -> int:
    return _TABLE[value]


def _also_used() -> int:
    return 5
'''


def test_signature_decorator_and_docstring_stay_and_the_body_goes() -> None:
    found = blank(SOURCE, ["reduce"], "ring.py")
    assert "def reduce(values: list[int], *, start: int = 0) -> int:" in found
    assert "values: What to add." in found
    assert "sum(values)" not in found
    assert 'raise NotImplementedError("write reduce")' in found


def test_one_method_is_blanked_and_its_neighbours_stay() -> None:
    found = blank(SOURCE, ["Ring.double"], "ring.py")
    assert "self.size = size" in found
    assert "@functools.cached_property" in found
    assert "_helper(self.size)" not in found


def test_a_class_loses_every_body_and_its_private_methods() -> None:
    found = blank(SOURCE, ["Ring"], "ring.py")
    assert "size: int = 4" in found
    assert "self.size = size" not in found
    assert "_secret" not in found
    assert found.count("NotImplementedError") == 2


def test_private_names_that_only_the_solution_used_go_with_it() -> None:
    found = blank(SOURCE, ["Ring", "reduce"], "ring.py")
    for name in ("_helper", "_deeper", "_TABLE", "_LIMIT"):
        assert name not in found
    for name in ("_also_used", "_KEPT"):
        assert name in found


def test_private_names_that_something_else_uses_stay() -> None:
    assert "_deeper" in blank(SOURCE, ["Ring"], "ring.py")


def test_what_is_blanked_is_still_a_module() -> None:
    ast.parse(blank(SOURCE, ["Ring", "reduce"], "ring.py"))


def test_a_symbol_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InfrastructureError, match=r"ring.py has no 'Ring.triple'"):
        blank(SOURCE, ["Ring.triple"], "ring.py")


def _manifest(name: str, symbol: str, given: tuple[str, ...] = ()) -> Manifest:
    words = {"en": name, "zh": name}
    return Manifest.model_validate(
        {
            "id": name,
            "version": "1",
            "title": words,
            "track": "torch",
            "detect": {"files": []},
            "policy": {"export": ["parallel/**"], "editable": ["parallel/**"], "given": given},
            "items": [{"id": "only", "title": words, "points": 100, "symbols": [symbol]}],
        }
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    reference = tmp_path / "reference"
    for path, text in {
        "__init__.py": '"""All."""\n',
        "comm.py": SOURCE,
        "data/__init__.py": '"""Data."""\n',
        "data/ddp.py": "from ..comm import reduce\n\n\ndef step() -> int:\n    return reduce([1])\n",
    }.items():
        (reference / path).parent.mkdir(parents=True, exist_ok=True)
        (reference / path).write_text(text)
    for name in ("one", "two"):
        folder = tmp_path / "assignments" / name
        (folder / "starter/tests").mkdir(parents=True)
        (folder / "starter/tests" / f"test_{name}.py").write_text("# public\n")
        (folder / "tests").mkdir()
        (folder / "tests/test_hidden.py").write_text("# hidden\n")
        (folder / "handout.md").write_text("# Build it\n")
        (folder / "handout.zh.md").write_text("# 动手\n")
    (tmp_path / "assignments/starter").mkdir()
    (tmp_path / "assignments/starter/README.md").write_text("# Start here\n")
    return tmp_path


ONE = _manifest("one", "data/ddp.py::step", ("comm.py",))
TWO = _manifest("two", "comm.py::reduce")


def test_one_starter_holds_no_solution_of_another_assignment(tree: Path) -> None:
    files = starter([ONE], [ONE, TWO], tree / "reference", tree / "assignments")
    assert b"sum(values)" not in files["parallel/comm.py"]
    assert b"return reduce" not in files["parallel/data/ddp.py"]


def test_a_starter_holds_its_own_files_and_nothing_hidden(tree: Path) -> None:
    files = starter([ONE], [ONE, TWO], tree / "reference", tree / "assignments")
    assert sorted(files) == [
        "README.md",
        "handouts/one.md",
        "handouts/one.zh.md",
        "parallel/__init__.py",
        "parallel/comm.py",
        "parallel/data/__init__.py",
        "parallel/data/ddp.py",
        "tests/test_one.py",
    ]


def test_given_files_are_whole_and_leave_out_what_the_student_writes(tree: Path) -> None:
    files = given_files(ONE, tree / "reference")
    assert sorted(files) == ["parallel/__init__.py", "parallel/comm.py", "parallel/data/__init__.py"]
    assert files["parallel/comm.py"].decode() == SOURCE


def test_a_given_file_that_does_not_exist_is_named(tree: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"nowhere\.py cannot be read"):
        given_files(_manifest("one", "data/ddp.py::step", ("nowhere.py",)), tree / "reference")
