"""Every test of this folder forks its ranks from this process, so no thread pool may start in it.

At the end it is said what was proved: cases by strategy, dtype and world size.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)

_HERE = Path(__file__).parent
_PROPERTY = "reference.case"
_SIZES = ("world_size", "size")
_DTYPES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16"}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note what a test is about; the note travels with its report, also from another process."""
    if _HERE in item.path.parents:
        item.user_properties.append((_PROPERTY, [_strategy(item), *_parameters(item)]))


def _strategy(item: pytest.Item) -> str:
    inside = item.path.relative_to(_HERE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem.removeprefix("test_")


def _parameters(item: pytest.Item) -> tuple[str, str]:
    """Return dtype and world size of a case. Everything is compared in float64 unless it says otherwise."""
    given: dict[str, Any] = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    size = next((given[name] for name in _SIZES if name in given), None)
    mesh, dtype = given.get("mesh"), given.get("dtype")
    size = mesh.world_size if mesh is not None else size
    return _DTYPES.get(dtype, "float64") if isinstance(dtype, torch.dtype) else "float64", str(size or "-")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    reports = terminalreporter.stats.get("passed", [])
    found = [tuple(value) for report in reports for name, value in report.user_properties if name == _PROPERTY]
    if not found:
        return
    sizes = sorted({size for _, _, size in found}, key=lambda size: (len(size), size))
    counts = Counter(found)
    terminalreporter.section("cases of the reference that passed, by world size (-: none)")
    terminalreporter.write_line(
        f"{'strategy':<20}{'dtype':<10}" + "".join(f"{size:>6}" for size in sizes) + f"{'all':>8}"
    )
    for strategy, dtype in sorted({(strategy, dtype) for strategy, dtype, _ in found}):
        row = [counts[strategy, dtype, size] for size in sizes]
        cells = "".join(f"{count or '':>6}" for count in row)
        terminalreporter.write_line(f"{strategy:<20}{dtype:<10}{cells}{sum(row):>8}")
    terminalreporter.write_line(
        f"{'all':<30}"
        + "".join(f"{sum(c for k, c in counts.items() if k[2] == s):>6}" for s in sizes)
        + f"{len(found):>8}"
    )
