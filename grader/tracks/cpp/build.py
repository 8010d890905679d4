"""Builds a student's framework, the official tests and our probes, in a sandbox that sees none of their inputs.

The original build file is tried first, the student's own where that one cannot build everything; what is built with
which is said, and both count. System headers come precompiled from the image: a source that does not compile with them
is compiled again without, so nothing that builds the plain way fails here. Sources that are the original ones byte for
byte are compiled several at once (CMake's unity build), each of the student's alone; a target that does not bear that,
for a student's header or for two helpers of one name, is compiled again one source at a time.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from grader.errors import InfrastructureError
from grader.sandbox import open_sandbox
from grader.sandbox.base import MEBIBYTE, Ending, Limits, Sandbox, Specification
from grader.tracks.cpp.compiler import CompileError, errors

BuildFile = Literal["pristine", "student"]
_BUILD_FILE = "CMakeLists.txt"
_OUT = "out"
_TOOLCHAIN = f"{_OUT}/.toolchain"
_EXECUTABLE = ("build.sh", "launcher")
_UNITY_FAILED = re.compile(r"^FAILED: .*?([^/ ]+)\.dir/Unity/unity_\d+", re.MULTILINE)
_MAX_BINARIES = 512 * MEBIBYTE
_MAX_CACHE = 192 * MEBIBYTE
_COMPILER = 640 * MEBIBYTE  # what one takes at its peak, measured on the sources that include most, and a third more
_THIRD_PARTY = "/opt/third_party"
# Tries with the precompiled headers; where that fails, what the plain way says is what counts.
_LAUNCHER = """#!/bin/sh
case "$*" in */test/*) headers=testing ;; *) headers=system ;; esac
said=$(mktemp)
if ccache "$@" -include /opt/pch/$headers.h -Winvalid-pch 2>"$said"; then cat "$said" >&2; rm -f "$said"; exit 0; fi
rm -f "$said"
exec ccache "$@"
"""
# Runs after the whole build file, when the libraries are known, whoever wrote the build file.
_INCLUDE = "cmake_language(DEFER CALL include {root}/probes.cmake)\n"
_PROBES = """set_source_files_properties({own} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
file(GLOB probe_sources {root}/probes/*.cc)
foreach(source ${{probe_sources}})
  get_filename_component(name ${{source}} NAME_WE)
  add_executable(probe_${{name}} ${{source}})
  target_include_directories(probe_${{name}} PRIVATE {root}/probes)
  foreach(library infini_train example_gpt2)
    if(TARGET ${{library}})
      target_link_libraries(probe_${{name}} ${{library}})
    endif()
  endforeach()
endforeach()
foreach(target {alone})
  if(TARGET ${{target}})
    set_target_properties(${{target}} PROPERTIES UNITY_BUILD OFF)
  endif()
endforeach()
"""
_SCRIPT = """#!/bin/sh
[ -n "$AGAIN" ] || rm -rf build {out}
ln -sfn {third_party} src/third_party
mkdir -p {out}
{{ g++ --version | head -n 1; cmake --version | head -n 1; }} > {toolchain} &
cmake -S src -B build -G Ninja -DBUILD_TEST=ON -DBUILD_TESTING=OFF -DUSE_CUDA={cuda} \\
  -DCMAKE_CXX_SCAN_FOR_MODULES=OFF -DCMAKE_CXX_COMPILER_LAUNCHER={root}/launcher \\
  -DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=mold -DCMAKE_RUNTIME_OUTPUT_DIRECTORY={root}/{out} \\
  -DCMAKE_PROJECT_TOP_LEVEL_INCLUDES={root}/include.cmake \\
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=8 || exit 1
known=$(ninja -C build -t targets all | sed 's/:.*//')
wanted=
for target in {targets}; do
  for name in $known; do [ "$name" = "$target" ] && wanted="$wanted $target" && break; done
done
wait
exec ninja -C build -k 0 -j {jobs} $wanted
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to build.

    Attributes:
        files: The student's files, overlaid, by path.
        originals: The original files by path, the build file among them; empty where they cannot be had.
        tests: Names of the official tests' targets.
        probes: Our programs' sources and headers by plain name; each `.cc` is a program `probe_<stem>`.
        timeout_s: For one build.
        memory_bytes: For all compilers together.
        cuda: Whether CUDA sources are built.
        cache: A folder of this student's own for the compile cache, or None.
        label: Which grading it is.
    """

    files: Mapping[str, bytes]
    originals: Mapping[str, bytes]
    tests: Sequence[str]
    probes: Mapping[str, bytes]
    timeout_s: float = 600.0
    memory_bytes: int = 4096 * MEBIBYTE
    cuda: bool = False
    cache: Path | None = None
    label: str = ""

    @property
    def build_file(self) -> bytes | None:
        """The original build file."""
        return self.originals.get(_BUILD_FILE)

    @property
    def own_sources(self) -> tuple[str, ...]:
        """The sources that are not the original ones byte for byte."""
        sources = (path for path in self.files if path.endswith((".cc", ".cpp", ".cu")))
        return tuple(path for path in sources if self.files[path] != self.originals.get(path))

    @property
    def targets(self) -> tuple[str, ...]:
        """Every program that is wanted."""
        programs = [f"probe_{PurePosixPath(name).stem}" for name in self.probes if name.endswith(".cc")]
        return (*self.tests, *programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What came of it.

    Attributes:
        binaries: Programs by target.
        errors: Complaints, in the student's paths, each once.
        failed_targets: Wanted programs that were not built.
        log: All that was printed, capped.
        used_build_file: Which build file this is the result of.
        toolchain: Compiler and CMake.
        timed_out: The build was ended.
        out_of_memory: The kernel ended a compiler.
    """

    binaries: Mapping[str, bytes]
    errors: tuple[CompileError, ...]
    failed_targets: tuple[str, ...]
    log: str
    used_build_file: BuildFile
    toolchain: str
    timed_out: bool = False
    out_of_memory: bool = False


@contextmanager
def building(kind: Literal["docker", "local"], image: str, plan: Plan) -> Iterator[BuildResult]:
    """Build everything that can be built, and lend what came of it.

    Meanwhile the compile cache is kept and the sandbox removed; that is done when the loan ends.

    Raises:
        InfrastructureError: The sandbox failed, or the local kind was asked for on a machine without the image's tools.
    """
    if kind == "local" and not Path(_THIRD_PARTY).is_dir():
        raise InfrastructureError(
            "C++ submissions are built in a container, and this is the local runner",
            "use --runner docker; `grader doctor` says how to get it",
        )
    sandbox = open_sandbox(kind, Specification(image=image, limits=_limits(plan), label=plan.label))
    with ThreadPoolExecutor(max_workers=1) as later:
        try:
            result = _build(sandbox, plan)
        except BaseException:
            sandbox.close()
            raise
        left = later.submit(_leave, sandbox, plan.cache)
        yield result
        left.result()


def _build(sandbox: Sandbox, plan: Plan) -> BuildResult:
    """Build with the original build file, and with the student's where more comes of that."""
    own = plan.files.get(_BUILD_FILE)
    files = {**_cached(plan.cache), **_files(sandbox, plan)}
    result = _attempt(sandbox, plan, "pristine" if plan.build_file is not None else "student", files)
    if result.failed_targets and plan.build_file is not None and own not in {None, plan.build_file}:
        second = _attempt(sandbox, plan, "student")
        return second if len(second.failed_targets) < len(result.failed_targets) else result
    return result


def _leave(sandbox: Sandbox, cache: Path | None) -> None:
    with sandbox:
        _save_cache(sandbox, cache)


def _limits(plan: Plan) -> Limits:
    return Limits(memory_bytes=plan.memory_bytes, scratch_bytes=2048 * MEBIBYTE, log_bytes=4 * MEBIBYTE)


def compilers_at_once(limits: Limits) -> int:
    """Return how many compilers run at once: on a machine of many cores they would not fit into the memory."""
    return max(1, min(int(limits.cpus), os.cpu_count() or 1, limits.memory_bytes // _COMPILER))


def _files(sandbox: Sandbox, plan: Plan) -> dict[str, bytes]:
    """Return what every attempt builds from."""
    root = str(sandbox.root)
    script = _SCRIPT.format(
        out=_OUT,
        toolchain=_TOOLCHAIN,
        root=root,
        third_party=_THIRD_PARTY,
        cuda="ON" if plan.cuda else "OFF",
        jobs=compilers_at_once(_limits(plan)),
        targets=" ".join(shlex.quote(target) for target in plan.targets),
    )
    sources = {f"src/{path}": content for path, content in plan.files.items() if not path.startswith("third_party/")}
    return {
        **sources,
        "build.sh": script.encode(),
        "launcher": _LAUNCHER.encode(),
        "include.cmake": _INCLUDE.format(root=root).encode(),
        **{f"probes/{name}": content for name, content in plan.probes.items()},
    }


def _cmake_list(paths: Sequence[str]) -> str:
    """Return paths as CMake's bracket arguments, in which nothing has a meaning but the bracket's own end."""
    return " ".join(f"[==[{path}]==]" for path in paths if "]==]" not in path) or "none"


def _attempt(sandbox: Sandbox, plan: Plan, which: BuildFile, files: Mapping[str, bytes] | None = None) -> BuildResult:
    """Build with one of the build files; where original sources do not compile together, those targets once more."""
    result = _compile(sandbox, plan, which, files=files)
    alone = _UNITY_FAILED.findall(result.log)
    return _compile(sandbox, plan, which, sorted(set(alone))) if alone else result


def _compile(
    sandbox: Sandbox,
    plan: Plan,
    which: BuildFile,
    alone: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
) -> BuildResult:
    """Build; where targets are to be compiled one source at a time, what is built already stays.

    `files` are put with the rest where they are not there yet: each putting is a program more in the container.
    """
    content = plan.build_file if which == "pristine" else plan.files.get(_BUILD_FILE)
    probes = _PROBES.format(root=sandbox.root, own=_cmake_list(plan.own_sources), alone=_cmake_list(alone))
    build_file = {f"src/{_BUILD_FILE}": content} if content is not None else {}
    sandbox.put({**(files or {}), "probes.cmake": probes.encode(), **build_file}, executable=_EXECUTABLE)
    environment = {**_environment(sandbox), "AGAIN": "yes" if alone else ""}
    finished = sandbox.run(["./build.sh"], timeout_s=plan.timeout_s, environment=environment)
    found = sandbox.get(_OUT, max_bytes=_MAX_BINARIES)
    binaries = {name.removeprefix(f"{_OUT}/"): data for name, data in found.items()}
    root = str(sandbox.root)
    log = f"{finished.stdout}\n{finished.stderr}"
    toolchain = found.get(_TOOLCHAIN, b"")[:4096].decode("utf-8", "replace")
    return BuildResult(
        binaries={name: binaries[name] for name in plan.targets if name in binaries},
        errors=errors(log, (f"{root}/src/", f"{root}/", "src/", "../src/")),
        failed_targets=tuple(name for name in plan.targets if name not in binaries),
        log=log.replace(f"{root}/src/", ""),
        used_build_file=which,
        toolchain=", ".join(toolchain.split("\n")).strip(", "),
        timed_out=finished.ending is Ending.TIMEOUT,
        out_of_memory=finished.ending is Ending.OUT_OF_MEMORY,
    )


def _environment(sandbox: Sandbox) -> dict[str, str]:
    """The compile cache goes by contents alone: every file of a sandbox is new."""
    return {
        "CCACHE_DIR": f"{sandbox.root}/ccache",
        "CCACHE_DEPEND": "1",
        "CCACHE_PCH_EXTSUM": "1",
        "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime",
        "CCACHE_MAXSIZE": "150M",
        "CCACHE_NOSTATS": "1",
        "CCACHE_BASEDIR": str(sandbox.root),
    }


def _cached(folder: Path | None) -> dict[str, bytes]:
    """Return the objects of the student's earlier commits, to be put into the sandbox."""
    if folder is None or not folder.is_dir():
        return {}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if sum(path.stat().st_size for path in files) > _MAX_CACHE:
        return {}
    return {f"ccache/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in files}


def _save_cache(sandbox: Sandbox, folder: Path | None) -> None:
    """Keep the student's own objects for the student's next commit; what is too large is not kept at all."""
    if folder is None:
        return
    for name, content in sandbox.get("ccache", max_bytes=_MAX_CACHE).items():
        path = folder / name.removeprefix("ccache/")
        if path.exists() and hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(content).digest():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        staged.write_bytes(content)
        staged.replace(path)
