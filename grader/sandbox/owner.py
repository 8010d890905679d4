"""Which process a container belongs to, so that what a crash or a power cut leaves behind can be told and removed."""

import contextlib
import os
from functools import cache
from pathlib import Path

import docker
import docker.errors
import psutil

LABEL = "org.tinyinfinitrain.grader"
_OWNER = f"{LABEL}.owner"


@cache
def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return str(psutil.boot_time())


def labels(grading: str) -> dict[str, str]:
    """Return the labels of a container that this process makes."""
    started = psutil.Process().create_time()
    return {LABEL: grading or "unnamed", _OWNER: f"{_boot()}:{os.getpid()}:{started}"}


def reap() -> int:
    """Remove every container whose owner is gone; return how many there were.

    A process is its boot, number and start time together: numbers are given out again.
    """
    try:
        api = docker.APIClient(version="auto")
    except docker.errors.DockerException:  # what needs the engine says so itself, and better
        return 0
    with contextlib.closing(api):
        ours = api.containers(all=True, filters={"label": LABEL})
        abandoned = [each["Id"] for each in ours if not _alive(each["Labels"].get(_OWNER, ""))]
        for container in abandoned:
            with contextlib.suppress(docker.errors.APIError):  # somebody else removes it just now
                api.remove_container(container, force=True, v=True)
    return len(abandoned)


def _alive(owner: str) -> bool:
    boot, _, rest = owner.partition(":")
    number, _, started = rest.partition(":")
    if boot != _boot() or not number.isdecimal():
        return False
    try:
        return str(psutil.Process(int(number)).create_time()) == started
    except psutil.NoSuchProcess:
        return False
