"""The runner images: what they are made from, whether they are here, and how they are made.

An image's tag is the hash of everything that it is made from, so an old one is never taken for a new one. Where no
registry is reachable, a Debian base is made by `docker/make_base.sh`; wheels are fetched by the host's own pip.
"""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import docker
import docker.errors
import requests

from grader.errors import InfrastructureError
from grader.settings import PROJECT_ROOT

Name = Literal["cpp", "cpp-run", "torch"]
Say = Callable[[str], None]
NAMES: tuple[Name, ...] = ("cpp", "cpp-run", "torch")
FOLDER = PROJECT_ROOT / "docker"
_REPOSITORY = "tinyinfinitrain"
_WHEELS = ("torch==2.13.0", "numpy", "safetensors")
_BUILD_S, _BASE_S = 1800, 900


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one image is made.

    Attributes:
        dockerfile: Below `docker/`.
        target: The stage of it; empty for the last.
        suite: The Debian release of the CPU base.
        folders: What the build needs besides the Dockerfile, below `docker/`.
        wheels: Whether Python wheels are put into the build.
    """

    dockerfile: str
    target: str
    suite: str
    folders: tuple[str, ...] = ()
    wheels: bool = False


# trixie has g++ 14 and CMake 3.31; bookworm has Python 3.11, for which there are CPU wheels of torch.
RECIPES: dict[Name, Recipe] = {
    "cpp": Recipe("cpp.Dockerfile", "build", "trixie", ("shims", "pch")),
    "cpp-run": Recipe("cpp.Dockerfile", "run", "trixie", ("shims", "pch")),
    "torch": Recipe("torch.Dockerfile", "", "bookworm", (), wheels=True),
}


def tag(name: Name, base: str = "") -> str:
    """Return the tag of an image, from the hash of what it is made from."""
    recipe = RECIPES[name]
    parts = [base or f"debian:{recipe.suite}", recipe.target, *(_WHEELS if recipe.wheels else ())]
    parts += [f"{path}:{hashlib.sha256(content).hexdigest()}" for path, content in sorted(_context(recipe).items())]
    if not base:
        parts.append(hashlib.sha256((FOLDER / "make_base.sh").read_bytes()).hexdigest())
    return f"{_REPOSITORY}/{name}:{_digest(chr(10).join(parts).encode())}"


def current(name: Name) -> str | None:
    """Return the tag of an image that is here and up to date, or None."""
    with _engine() as api:
        return tag(name) if api.images(tag(name)) else None


def require(name: Name) -> str:
    """Return the tag of an image.

    Raises:
        InfrastructureError: It is not here, or the engine does not answer.
    """
    found = current(name)
    if found is None:
        raise InfrastructureError(f"the image {tag(name)} is not here", f"build it: grader images build {name}")
    return found


def digest(reference: str) -> str:
    """Return the engine's digest of an image that is here."""
    with _engine() as api:
        return str(api.inspect_image(reference)["Id"])


def engine_version() -> str:
    """Return the engine's name and version.

    Raises:
        InfrastructureError: It does not answer.
    """
    with _engine() as api:
        found = api.version()
    return f"{found['Version']} (API {found['ApiVersion']}), {found['Os']}/{found['Arch']}"


def ensure(name: Name, say: Say, base: str = "") -> str:
    """Build an image unless it is here, and return its tag.

    Args:
        name: Which one.
        say: Told what happens.
        base: An image to build on, for example a CUDA one; a Debian base is made where left out.

    Raises:
        InfrastructureError: The engine, the base or the build failed.
    """
    wanted = tag(name, base)
    with _engine() as api:
        if api.images(wanted):
            return wanted
        recipe = RECIPES[name]
        files = dict(_context(recipe))
        if recipe.wheels:
            files |= _wheels(say)
        base = base or _make_base(api, recipe.suite, say)
        say(f"building {wanted} on {base}")
        stream = api.build(
            fileobj=io.BytesIO(_archive(files)),
            custom_context=True,
            dockerfile=recipe.dockerfile,
            target=recipe.target or None,
            buildargs={"BASE": base},
            tag=wanted,
            network_mode="host",
            rm=True,
            forcerm=True,
            decode=True,
        )
        for event in stream:
            if "error" in event:
                raise InfrastructureError(f"image {name} cannot be built: {event['error']}", "see what it said above")
            line = str(event.get("stream", "")).strip()
            if line:
                say(line)
    return wanted


def _make_base(api: docker.APIClient, suite: str, say: Say) -> str:
    """Return a Debian base, made by debootstrap unless it is here."""
    script = FOLDER / "make_base.sh"
    made_from = _digest(script.read_bytes())
    name, wanted = f"{_REPOSITORY}/base-{suite}", made_from
    if api.images(f"{name}:{wanted}"):
        return f"{name}:{wanted}"
    if shutil.which("debootstrap") is None:
        raise InfrastructureError("debootstrap is missing", "apt-get install debootstrap, or name a base with --base")
    say(f"making a Debian {suite} base")
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "base.tar"
        _program([str(script), suite, str(archive)], _BASE_S)
        api.import_image_from_file(str(archive), repository=name, tag=wanted)
    return f"{name}:{wanted}"


def _wheels(say: Say) -> dict[str, bytes]:
    """Return the wheels that a torch image is made from, by path in the build."""
    say(f"fetching wheels: {', '.join(_WHEELS)}")
    with tempfile.TemporaryDirectory() as scratch:
        options = [] if sys.version_info[:2] == (3, 11) else ["--python-version", "3.11", "--only-binary=:all:"]
        _program([sys.executable, "-m", "pip", "download", "--quiet", "--dest", scratch, *options, *_WHEELS], _BUILD_S)
        return {f"wheels/{path.name}": path.read_bytes() for path in Path(scratch).iterdir()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _program(argv: list[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"{argv[0]} failed: {error}", "try again") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-500:]
        raise InfrastructureError(
            f"{Path(argv[0]).name} failed with exit code {done.returncode}: {said}", "see what it said"
        )


def _context(recipe: Recipe) -> Mapping[str, bytes]:
    paths = [FOLDER / recipe.dockerfile]
    paths += [path for folder in recipe.folders for path in sorted((FOLDER / folder).rglob("*")) if path.is_file()]
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@contextmanager
def _engine() -> Iterator[docker.APIClient]:
    try:
        api = docker.APIClient(version="auto", timeout=_BUILD_S)
        try:
            yield api
        finally:
            api.close()
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise InfrastructureError(
            f"the Docker engine does not answer: {' '.join(str(error).split())[:300]}",
            "start it: grader doctor says how",
        ) from error
