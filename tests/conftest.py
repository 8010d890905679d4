"""Leaves out, and names, what this machine cannot run; `GRADER_REQUIRE` turns that into a failure."""

import os
import shutil
from collections import Counter
from functools import cache

import docker
import docker.errors
import pytest
import requests
import torch
from hypothesis import settings

settings.register_profile("shared machine", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("shared machine")


@cache
def _docker_runs() -> bool:
    try:
        client = docker.from_env(timeout=10)
        client.ping()
    except (docker.errors.DockerException, requests.RequestException):
        return False
    client.close()
    return True


def _browser_runs() -> bool:
    return shutil.which("chromium") is not None


ENGINES = {"docker": _docker_runs, "browser": _browser_runs, "gpu": torch.cuda.is_available}
FIXES = {
    "docker": "start a Docker engine (`grader doctor` says how)",
    "browser": "install Chromium (Debian: apt-get install chromium)",
    "gpu": "run on a machine with an NVIDIA GPU",
}


def pytest_sessionstart(session: pytest.Session) -> None:
    required = [name for name in os.environ.get("GRADER_REQUIRE", "").split(",") if name]
    unknown = [name for name in required if name not in ENGINES]
    if unknown:
        pytest.exit(f"GRADER_REQUIRE names {unknown}, expected some of {sorted(ENGINES)}", returncode=4)
    missing = [name for name in required if not ENGINES[name]()]
    if missing:
        advice = "; ".join(FIXES[name] for name in missing)
        pytest.exit(f"GRADER_REQUIRE asks for {', '.join(missing)}, which this machine lacks: {advice}", returncode=3)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: Counter[str] = Counter()
    kept, dropped = [], []
    for item in items:
        missing = next((name for name in ENGINES if item.get_closest_marker(name) and not ENGINES[name]()), None)
        if missing is None:
            kept.append(item)
        else:
            left_out[missing] += 1
            dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    config.stash[_LEFT_OUT] = left_out


_LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    left_out = config.stash.get(_LEFT_OUT, None)
    if left_out is None:  # under xdist the workers collect, so the marks are counted by none here
        left_out = Counter({name: 1 for name, runs in ENGINES.items() if not runs()})
        for name in left_out:
            terminalreporter.write_line(f"left out: every test that needs {name}: {FIXES[name]}")
        return
    for name, count in sorted(left_out.items()):
        terminalreporter.write_line(f"left out: {count} tests that need {name}: {FIXES[name]}")
