"""`assignment.toml`: what an assignment asks for, what it gives, what a student may edit, and its limits."""

import tomllib
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grader.errors import InfrastructureError


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Text(_Model):
    """A text in the two languages of the course."""

    en: str
    zh: str

    def in_language(self, language: str) -> str:
        """Return the text in `language` (`en` or `zh`)."""
        return self.zh if language == "zh" else self.en


class Detect(_Model):
    """The assignment is there when every one of these files is in the tree."""

    files: tuple[str, ...]


class Policy(_Model):
    """Which files count, in gitignore's pattern language, relative to the repository's root.

    Attributes:
        export: What is taken from the student's tree; everything else is left in git.
        editable: What a student is asked to edit. An edit elsewhere, inside `export`, is flagged.
        overlay: What is replaced by the original whatever the student did: tests and their data.
        given: For torch assignments, files of `reference/` that are put into the student's `parallel/`.
        max_files, max_file_bytes, max_total_bytes: Caps of the export.
    """

    export: tuple[str, ...]
    editable: tuple[str, ...]
    overlay: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    max_files: int = 2_000
    max_file_bytes: int = 4 << 20
    max_total_bytes: int = 64 << 20


class Bounds(_Model):
    """Wall times in seconds, memory in mebibytes."""

    build_s: float = 600.0
    case_s: float = 60.0
    memory_mib: int = 4096
    processes: int = 256


class Origin(_Model):
    """Where the originals of a C++ assignment come from; `commit` has 40 hexadecimal digits."""

    repository: str
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")


class CheckSpec(_Model):
    """One check as the manifest announces it. What it does stands in the assignment's `tests/`.

    Attributes:
        advice: A check that teaches and never costs a point.
        device: Where it runs. Where an item has checks on both and the runner has CUDA, those on CUDA decide.
    """

    id: str
    title: Text
    weight: float = Field(default=1.0, gt=0)
    visibility: Literal["public", "hidden"] = "public"
    hint: Text | None = None
    advice: bool = False
    device: Literal["cpu", "cuda"] = "cpu"


class ItemSpec(_Model):
    """A part of the assignment that carries points.

    Attributes:
        needs: What a runner must have: `cuda`, or nothing.
        official: Upstream's test file, for C++ items that have one.
        official_suite: The name of the test binary's target; the file's stem where left out.
        depends: Items that must pass first; where one did not, this one is skipped with the reason.
        symbols: `file::qualified.name` of what the student fills in (torch); the starter blanks them.
    """

    id: str
    title: Text
    points: float = Field(gt=0)
    needs: tuple[Literal["cuda"], ...] = ()
    official: str | None = None
    official_needs: tuple[Literal["cuda", "data"], ...] = ()
    depends: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    checks: tuple[CheckSpec, ...] = ()
    provisional_on_cpu: Text | None = None

    def check(self, check_id: str) -> CheckSpec | None:
        """Return the announced check of that id, or None."""
        return next((spec for spec in self.checks if spec.id == check_id), None)


class Manifest(_Model):
    """One assignment."""

    id: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    version: str
    title: Text
    track: Literal["cpp", "torch"]
    detect: Detect
    policy: Policy
    limits: Bounds = Bounds()
    origin: Origin | None = None
    items: tuple[ItemSpec, ...]
    world_sizes: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _check_items(self) -> Self:
        ids = [item.id for item in self.items]
        if len(ids) != len(set(ids)):
            raise ValueError(f"two items have the same id: {ids}")
        for item in self.items:
            for needed in item.depends:
                if needed not in ids[: ids.index(item.id)]:
                    raise ValueError(f"item {item.id!r} depends on {needed!r}, which does not stand before it")
        return self

    @property
    def maximum(self) -> float:
        """Points of the whole assignment."""
        return sum(item.points for item in self.items)

    def item(self, item_id: str) -> ItemSpec:
        """Return one item.

        Raises:
            KeyError: No item has that id.
        """
        for item in self.items:
            if item.id == item_id:
                return item
        raise KeyError(item_id)


def load(folder: Path) -> Manifest:
    """Read `folder/assignment.toml`.

    Raises:
        InfrastructureError: It is missing, not TOML, or says something that a manifest cannot say.
    """
    path = folder / "assignment.toml"
    try:
        return Manifest.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise InfrastructureError(f"{path} is no usable manifest: {error}", "mend the file it names") from error


def load_all(root: Path) -> dict[str, Manifest]:
    """Read every assignment below `root`, by id, in the order of their names."""
    found = (load(path.parent) for path in sorted(root.glob("*/assignment.toml")))
    return {manifest.id: manifest for manifest in found}
