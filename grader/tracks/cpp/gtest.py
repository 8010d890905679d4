"""Official cases: which a test file declares, and how one ends, each in a process of its own."""

import json
import re
from typing import Any

from grader.tracks.agent import AgentClient, Command, CommandFinished, ProgramLimits, SubmissionFailure

_RESULT = "result.json"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CASE = re.compile(r"\bTEST(?:_F)?\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)")
_FATAL = re.compile(r"^F\d{4,8} [^\]]*\] (.*)$", re.MULTILINE)
_BUILD_PATH = re.compile(r"^(?:/\S*?/|\.\./)src/", re.MULTILINE)  # what stands before the student's own path
_LOG_CHARACTERS = 2_000
_MOST_FAILURES = 5


def declared_cases(source: bytes) -> tuple[str, ...]:
    """Return the cases of a test file as `Suite.Case`, in its order."""
    text = _COMMENT.sub(" ", source.decode("utf-8", "replace"))
    return tuple(f"{suite}.{case}" for suite, case in _CASE.findall(text))


def run_case(
    client: AgentClient,
    target: str,
    case: str,
    *,
    folder: str = "bin",
    timeout_s: float = 60.0,
    limits: ProgramLimits | None = None,
) -> None:
    """Run one case of a test program.

    A case has passed when its process ended with 0 *and* googletest's own report says that the case was run to its end
    without a failure: a program that ends early says nothing.

    Args:
        client: The agent of the sandbox that holds the programs.
        target: The program's name.
        case: `Suite.Case`.
        folder: Where the programs lie, below the sandbox's root.
        timeout_s: Wall time.
        limits: What it may use.

    Raises:
        SubmissionFailure: It did not pass.
        InfrastructureError: The sandbox failed.
    """
    command = Command(
        argv=[
            str(client.sandbox.root / folder / target),
            f"--gtest_filter={case}",
            f"--gtest_output=json:{{case}}/{_RESULT}",
            "--gtest_color=no",
        ],
        timeout_s=timeout_s,
        limits=limits or ProgramLimits(),
        outputs=(_RESULT,),
    )
    _judge(case, client.run_command(command))


def _judge(case: str, finished: CommandFinished) -> None:
    log = {"log": _tail(finished)}
    if finished.out_of_memory:
        raise SubmissionFailure("out_of_memory", f"{case} used up its memory", log)
    if finished.ending == "timeout":
        raise SubmissionFailure("timeout", f"{case} did not end within {finished.duration_s:.0f} s", log)
    report = _report(finished.outputs.get(_RESULT), case)
    if report is None:
        fatal = _FATAL.search(finished.stderr)
        code = finished.exit_code or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        because = f": {fatal[1]}" if fatal else ""
        raise SubmissionFailure("crashed", f"{case} ended before googletest could report, with {how}{because}", log)
    found = [str(each.get("failure", "")).strip() for each in report.get("failures", ())]
    failures = [_BUILD_PATH.sub("", failure) for failure in found[:_MOST_FAILURES]]
    if failures:
        raise SubmissionFailure("failed", "\n".join(failures), log)
    if report.get("result") != "COMPLETED":
        raise SubmissionFailure("failed", f"{case} was not run to its end: {str(report.get('result'))[:40]}", log)
    if finished.exit_code != 0:
        raise SubmissionFailure("crashed", f"{case} passed, then the program ended with {finished.exit_code}", log)


def _report(payload: bytes | None, case: str) -> dict[str, Any] | None:
    """Return googletest's report of one case, or None where there is none that can be read."""
    try:
        document = json.loads(payload or b"")
        cases = {
            f"{suite['name']}.{each['name']}": each for suite in document["testsuites"] for each in suite["testsuite"]
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    found = cases.get(case)
    return found if isinstance(found, dict) and isinstance(found.get("failures", []), list) else None


def _tail(finished: CommandFinished) -> str:
    return "\n".join(filter(None, (finished.stdout, finished.stderr)))[-_LOG_CHARACTERS:]
