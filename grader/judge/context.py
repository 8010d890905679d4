"""What one judging needs to know, and what it hands back. Both cross a process boundary as JSON on disk."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grader.assignment.manifest import CheckSpec, ItemSpec, Manifest
from grader.errors import InfrastructureError
from grader.record import Check

Device = Literal["cpu", "cuda"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BuildError(_Model):
    """One error of the compiler, in the student's own paths. `path` is empty where it names no file."""

    target: str
    path: str = ""
    line: int | None = None
    column: int | None = None
    message: str


class Official(_Model):
    """The official test file of one item: the target that holds it, and the cases that it must hold.

    `cases` are `Suite.Case`, read from the pinned original and never from what the student's binary says.
    """

    target: str
    cases: tuple[str, ...]


class Context(_Model):
    """Everything that the judge's process is told.

    Attributes:
        assignment_dir: The staff's folder of the assignment: manifest, harness, tests.
        kind, image, gpus: The sandbox to open, as `open_sandbox` takes them.
        workspace_dir: The student's prepared files (torch).
        binaries_dir: What was built, a file a target (C++); None where nothing was.
        data_dir: The originals' data that official cases read at run time, if any.
        build_errors, failed_targets: What did not build, and why.
        build_ending: `timeout` or `out_of_memory` where the build was ended before it was through.
        official: The official test files by item; an item that is missing here is graded by probes alone.
        devices: What the runner has. `cpu` is always there.
        has_data: Whether the official tests' large data files are here.
        seed: Where every input of this grading comes from.
        results_path: Where results are appended, a JSON object a line.
        public_only: Leave the hidden checks out (a student's own check).
        label: Which grading the sandboxes belong to.
    """

    assignment_dir: Path
    kind: Literal["docker", "local"]
    image: str = ""
    gpus: int = 0
    workspace_dir: Path
    binaries_dir: Path | None = None
    data_dir: Path | None = None
    build_errors: tuple[BuildError, ...] = ()
    failed_targets: tuple[str, ...] = ()
    build_ending: Literal["finished", "timeout", "out_of_memory"] = "finished"
    official: dict[str, Official] = Field(default_factory=dict)
    devices: tuple[Device, ...] = ("cpu",)
    has_data: bool = False
    seed: int = Field(ge=0, lt=1 << 63)
    results_path: Path
    language: Literal["en", "zh"] = "en"
    public_only: bool = False
    label: str = ""

    @property
    def capabilities(self) -> frozenset[str]:
        """What this runner can do beyond the CPU: `cuda`, `data`."""
        found = {device for device in self.devices if device != "cpu"}
        return frozenset(found | ({"data"} if self.has_data else set()))

    def write(self, path: Path) -> None:
        """Store it at `path`."""
        path.write_text(self.model_dump_json(), encoding="utf-8")


class CheckResult(_Model):
    """How one check of one item ended."""

    item: str
    check: Check


def read(path: Path) -> Context:
    """Read what `Context.write` stored.

    Raises:
        InfrastructureError: The file is missing or is no context.
    """
    try:
        return Context.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InfrastructureError(f"{path} is no judge's context: {error}") from error


def visible(context: Context, spec: CheckSpec) -> bool:
    """Whether this judging runs the check: a student's own check has no hidden ones."""
    return spec.visibility == "public" or not context.public_only


def device_of(item: ItemSpec, spec: CheckSpec | None) -> Device:
    """Return where a check runs: on CUDA where its item needs that, else where the manifest puts the check."""
    if "cuda" in item.needs:
        return "cuda"
    return spec.device if spec is not None else "cpu"


def lacking(context: Context, item: ItemSpec, spec: CheckSpec | None) -> str:
    """Return what this runner lacks to run a check, or an empty text.

    Args:
        context: The judging.
        item: The check's item.
        spec: The announced check, or None for an official case.
    """
    needed = set(item.needs) | ({"cuda"} if device_of(item, spec) == "cuda" else set())
    if spec is None:
        needed |= set(item.official_needs)
    return ", ".join(sorted(needed - context.capabilities))


def planned(context: Context, manifest: Manifest) -> tuple[tuple[str, str], ...]:
    """Return (item, check id) of every check of which a result must come back, in the manifest's order."""
    plan: list[tuple[str, str]] = []
    for item in manifest.items:
        official = context.official.get(item.id)
        if official is not None:
            plan += [(item.id, f"official/{case}") for case in official.cases]
        plan += [(item.id, spec.id) for spec in item.checks if visible(context, spec)]
    return tuple(plan)
