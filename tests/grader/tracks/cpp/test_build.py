"""Checks how a build shares out what its sandbox has."""

import os

from grader.sandbox.base import MEBIBYTE, Limits
from grader.tracks.cpp.build import compilers_at_once


def test_compilers_fit_into_the_memory_on_a_machine_of_many_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert compilers_at_once(Limits(memory_bytes=4096 * MEBIBYTE, cpus=64.0)) == 6
    assert compilers_at_once(Limits(memory_bytes=4096 * MEBIBYTE, cpus=2.0)) == 2
    assert compilers_at_once(Limits(memory_bytes=256 * MEBIBYTE, cpus=64.0)) == 1


def test_compilers_are_no_more_than_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert compilers_at_once(Limits(cpus=2.0)) == 1
