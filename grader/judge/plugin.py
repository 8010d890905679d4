"""The pytest plugin with which an assignment's `tests/` judge a submission, outside its sandbox.

Loaded by `-p grader.judge.plugin --grader-context FILE`. A test says what it checks:

    @pytest.mark.check(item="matmul", id="probe/matmul_2d")
    def test_products_lie_within_rounding(submission, generator): ...

and ends in one of these ways: it returns (passed), raises `CheckFailure` (failed), the submission's own code broke
(`SubmissionFailure`: crashed, timeout, out_of_memory, build_error), `pytest.skip` (not_run), or anything else, which
is our own bug and so infra_error: also a bare `assert`. Title, weight, visibility and hint come from the manifest.
Several marks on one test make it several checks; `{name}` in an id is filled in from the test's other parameters.

Results go to `Context.results_path`, one JSON object a line, as they come; under xdist the controller writes them.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.fx.experimental.symbolic_shapes  # gradients import it late: better while a submission is built

from grader.assignment.manifest import Manifest, load
from grader.judge.context import CheckResult, Context, Device, lacking, read
from grader.judge.official import SUBMISSIONS, OfficialCase
from grader.judge.outcome import Claim, Ended, ending, to_result
from grader.judge.programs import CppSubmission
from grader.judge.results import append, fallen, read_results
from grader.judge.submission import Submissions, TorchSubmission
from grader.record import CheckStatus

_CONTEXT = pytest.StashKey[Context]()
_MANIFEST = pytest.StashKey[Manifest]()
_CLAIM = pytest.StashKey[Claim]()
_EXIT = pytest.StashKey[int]()
_METRICS = pytest.StashKey[dict[str, float]]()
_RESULT = "grader.result"
_POLL_S = 0.02


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one option, which names the context's file."""
    parser.addoption("--grader-context", type=Path, help="what to judge, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Read the context and the manifest once a process."""
    config.addinivalue_line("markers", "check(item, id): which check of which item a test is")
    path = config.getoption("--grader-context")
    if path is None:
        raise pytest.UsageError("the judge needs --grader-context FILE")
    _await(path)
    config.stash[_CONTEXT] = context = read(path)
    config.stash[_MANIFEST] = manifest = load(context.assignment_dir)
    config.stash[SUBMISSIONS] = Submissions(context, manifest)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(context.results_path), "grader.results")


def _await(path: Path) -> None:
    """Wait until there is something to judge, or nobody is left who could say so."""
    starter = os.getppid()
    while not path.exists():
        if os.getppid() != starter:
            pytest.exit("nobody waits for a judge any more", returncode=pytest.ExitCode.INTERRUPTED)
        time.sleep(_POLL_S)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep how it ended, for the end of the process."""
    session.config.stash[_EXIT] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove this process's sandbox, and end at once: taking torch down by the interpreter's rules takes a second."""
    submissions, is_worker = config.stash.get(SUBMISSIONS, None), hasattr(config, "workerinput")
    if submissions is not None:
        submissions.close()
    # Any other end has something to say after this.
    if config.stash.get(_EXIT, None) in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} and not is_worker:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_EXIT])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test one pytest item for each of its marks."""
    marks = [dict(mark.kwargs) for mark in metafunc.definition.iter_markers("check")]
    if marks:
        names = [f"{mark.get('item')}:{mark.get('id')}" for mark in reversed(marks)]
        metafunc.parametrize("_claimed", list(reversed(marks)), indirect=True, ids=names)


def pytest_collection_modifyitems(config: pytest.Config, session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add the official cases, leave out what this judging does not run, and put all in the manifest's order."""
    context, manifest = config.stash[_CONTEXT], config.stash[_MANIFEST]
    for item_id, official in context.official.items():
        for case in official.cases:
            items.append(OfficialCase.make(session, item_id, official.target, case))
    for item in items:
        item.stash[_CLAIM] = _claim(item, manifest)
    _refuse_duplicates(items)
    hidden = [item for item in items if context.public_only and item.stash[_CLAIM].visibility == "hidden"]
    if hidden:
        config.hook.pytest_deselected(items=hidden)
    order = {item.id: place for place, item in enumerate(manifest.items)}
    kept = [item for item in items if item not in hidden]
    items[:] = sorted(kept, key=lambda item: order[item.stash[_CLAIM].item.id])


def _claim(item: pytest.Item, manifest: Manifest) -> Claim:
    """Return which check a pytest item is."""
    if isinstance(item, OfficialCase):
        return Claim(manifest.item(item.item_id), item.check_id, None)
    params: dict[str, Any] = dict(cast(pytest.Function, item).callspec.params) if hasattr(item, "callspec") else {}
    mark = params.get("_claimed")
    if mark is None or set(mark) != {"item", "id"}:
        raise pytest.UsageError(f"{item.nodeid} needs a mark check(item=..., id=...)")
    check_id = str(mark["id"]).format(**params)
    if mark["item"] not in {spec.id for spec in manifest.items}:
        raise pytest.UsageError(f"{item.nodeid} names the item {mark['item']!r}, which the manifest does not have")
    spec = manifest.item(mark["item"])
    announced = spec.check(check_id)
    if announced is None:
        raise pytest.UsageError(f"{item.nodeid} is {check_id!r} of {spec.id!r}, which the manifest does not announce")
    return Claim(spec, check_id, announced)


def _refuse_duplicates(items: list[pytest.Item]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for item in items:
        key = item.stash[_CLAIM].key
        if key in seen:
            raise pytest.UsageError(f"{item.nodeid} and {seen[key]} are both the check {key[1]!r} of {key[0]!r}")
        seen[key] = item.nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what this runner cannot run, and what stands on an item that failed."""
    context, manifest, claim = item.config.stash[_CONTEXT], item.config.stash[_MANIFEST], item.stash[_CLAIM]
    item.stash[_METRICS] = {}
    missing = lacking(context, claim.item, claim.spec)
    if missing:
        raise Ended(CheckStatus.NOT_RUN, f"this runner lacks {missing}")
    if claim.item.depends:
        down = fallen(manifest, read_results(context.results_path), context.capabilities)
        for needed in claim.item.depends:
            if needed in down:
                raise Ended(CheckStatus.SKIPPED, down[needed])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Turn how a test ended into the check's result, and let it travel with the report."""
    report = cast(pytest.TestReport, (yield))
    broke_early = call.when == "setup" and call.excinfo is not None
    if call.when == "call" or broke_early:
        error = call.excinfo.value if call.excinfo is not None else None
        result = to_result(
            item.stash[_CLAIM],
            ending(error),
            language=item.config.stash[_CONTEXT].language,
            duration_s=call.duration,
            metrics=item.stash.get(_METRICS, {}),
        )
        report.user_properties.append((_RESULT, result.model_dump_json()))
    return report


class _Writer:
    """Appends results as reports come. Only the controller has one: workers' reports arrive there too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _RESULT:
                append(self._path, CheckResult.model_validate_json(str(value)))


@pytest.fixture(autouse=True)  # so that every test can be made several items by its marks
def _claimed(request: pytest.FixtureRequest) -> Any:
    return getattr(request, "param", None)


@pytest.fixture(scope="session")
def context(pytestconfig: pytest.Config) -> Context:
    """What is judged here."""
    return pytestconfig.stash[_CONTEXT]


@pytest.fixture(scope="session")
def manifest(pytestconfig: pytest.Config) -> Manifest:
    """The assignment's manifest."""
    return pytestconfig.stash[_MANIFEST]


@pytest.fixture
def submission(pytestconfig: pytest.Config) -> Iterator[TorchSubmission | CppSubmission]:
    """The student's code in this worker's sandbox: `.run(...)` for torch, `.probe(...)` for C++."""
    with pytestconfig.stash[SUBMISSIONS].use() as lent:
        yield lent


@pytest.fixture
def metrics(request: pytest.FixtureRequest) -> dict[str, float]:
    """Numbers that go into the record beside the verdict: {"bytes_sent": ...}."""
    return cast(pytest.Item, request.node).stash[_METRICS]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    """`cpu` or `cuda`: where the manifest puts this check."""
    return cast(pytest.Item, request.node).stash[_CLAIM].device


@pytest.fixture
def generator(request: pytest.FixtureRequest, context: Context) -> torch.Generator:
    """A generator of its own for each check, drawn from the grading's seed, so that any check replays alone."""
    claim = cast(pytest.Item, request.node).stash[_CLAIM]
    return torch.Generator().manual_seed(claim.seed(context.seed))
