"""Makes what a student starts from: the reference, with the symbols that manifests name left for the student to write.

No second copy of the template exists. In the student's repository the package is called `parallel`, with the file names
of `reference/`; imports inside are relative, so the files are the same byte for byte but for what was blanked.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import cast

import libcst as cst

from grader.assignment.manifest import Manifest
from grader.errors import InfrastructureError

PACKAGE = "parallel"
_COPIED = "starter"  # the folder, of one assignment or of all, whose files are copied as they are


def starter(
    chosen: Iterable[Manifest], known: Iterable[Manifest], reference: Path, assignments: Path
) -> dict[str, bytes]:
    """Return the files of a student's repository, by path.

    Args:
        chosen: The assignments that the repository is for.
        known: All assignments. What any of them asks for is blanked, so that one's starter holds no other's solution.
        reference: The folder of the reference.
        assignments: The folder of all assignments.

    Raises:
        InfrastructureError: A manifest names a file or a symbol that the reference does not have.
    """
    symbols = symbols_by_file(known)
    files = _below(assignments / _COPIED)
    for manifest in chosen:
        files |= _below(assignments / manifest.id / _COPIED)
        for suffix in ("", ".zh"):
            handout = assignments / manifest.id / f"handout{suffix}.md"
            files[f"handouts/{manifest.id}{suffix}.md"] = _read(handout)
        own = symbols_by_file([manifest])
        for path in sorted({*_with_packages(manifest.policy.given), *_with_packages(own)}):
            files[f"{PACKAGE}/{path}"] = _blanked(_read(reference / path), symbols.get(path, ()), path)
    return files


def given_files(manifest: Manifest, reference: Path) -> dict[str, bytes]:
    """Return the files that every submission is given anew when it is graded, by path in the student's repository.

    They are the manifest's `given`, plain paths below `reference/`, and the `__init__.py` of every folder.

    Raises:
        InfrastructureError: One of them does not exist.
    """
    edited = set(symbols_by_file([manifest]))
    paths = {*_with_packages(manifest.policy.given), *_with_packages(edited)} - edited
    return {f"{PACKAGE}/{path}": _read(reference / path) for path in sorted(paths)}


def symbols_by_file(manifests: Iterable[Manifest]) -> dict[str, tuple[str, ...]]:
    """Return the symbols that manifests name, by file below `reference/`."""
    found: dict[str, dict[str, None]] = {}
    for manifest in manifests:
        for item in manifest.items:
            for symbol in item.symbols:
                path, _, name = symbol.partition("::")
                found.setdefault(path, {})[name] = None
    return {path: tuple(names) for path, names in found.items()}


def blank(source: str, symbols: Collection[str], path: str) -> str:
    """Return `source` with the bodies of the named functions, methods and classes left to be written.

    Signatures, decorators and docstrings stay. Of a class, every method is blanked and its private ones go. Private
    names of the module that only blanked code used go too: they are a part of the solution.

    Args:
        source: A Python module.
        symbols: Qualified names: `function`, `Class`, `Class.method`.
        path: The module's path, for messages.

    Raises:
        InfrastructureError: `source` has no such symbol.
    """
    before = cst.parse_module(source)
    blanker = _Blanker(symbols)
    after = before.visit(blanker)
    missing = set(symbols) - blanker.found
    if missing:
        raise InfrastructureError(f"{path} has no {sorted(missing)[0]!r}, which a manifest names", "mend the manifest")
    live = _referenced(before)
    while dead := (_private_names(after) & live) - _referenced(after):
        after = after.with_changes(body=[statement for statement in after.body if _defines(statement) not in dead])
    return after.code


class _Blanker(cst.CSTTransformer):
    def __init__(self, symbols: Collection[str]) -> None:
        super().__init__()
        self._symbols = symbols
        self._path: list[str] = []
        self._blanking: list[bool] = [False]
        self.found: set[str] = set()

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:  # noqa: N802  (libcst's own name)
        self._enter(node.name.value)
        return True

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:  # noqa: N802
        del original_node
        self._leave()
        if not updated_node.body.body:
            return updated_node.with_changes(body=cst.IndentedBlock(body=[cst.parse_statement("pass")]))
        return updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802
        self._enter(node.name.value)
        return False

    def leave_FunctionDef(  # noqa: N802
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef | cst.RemovalSentinel:
        del original_node
        qualified, inside_blanked = ".".join(self._path), self._blanking[-2]
        blanking = self._leave()
        if not blanking:
            return updated_node
        if inside_blanked and _is_private(updated_node.name.value):
            return cst.RemoveFromParent()
        return updated_node.with_changes(body=_unwritten(updated_node, qualified))

    def _enter(self, name: str) -> None:
        self._path.append(name)
        qualified = ".".join(self._path)
        named = qualified in self._symbols
        if named:
            self.found.add(qualified)
        self._blanking.append(named or self._blanking[-1])

    def _leave(self) -> bool:
        self._path.pop()
        return self._blanking.pop()


def _unwritten(function: cst.FunctionDef, qualified: str) -> cst.IndentedBlock:
    docstring = function.get_docstring(clean=False)
    first = function.body.body[:1] if docstring is not None else ()
    left = cst.parse_statement(f'raise NotImplementedError("write {qualified}")')
    return cst.IndentedBlock(body=[*cast(Iterable[cst.BaseStatement], first), left])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _defines(statement: cst.CSTNode) -> str | None:
    """Return the name that a statement of a module defines, where it defines exactly one."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return statement.name.value
    return _assigned(statement)


def _assigned(statement: cst.CSTNode) -> str | None:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    only = statement.body[0]
    target: cst.BaseExpression | None = None
    if isinstance(only, cst.Assign) and len(only.targets) == 1:
        target = only.targets[0].target
    elif isinstance(only, cst.AnnAssign):
        target = only.target
    return target.value if isinstance(target, cst.Name) else None


def _private_names(module: cst.Module) -> set[str]:
    names = {_defines(statement) for statement in module.body}
    return {name for name in names if name is not None and _is_private(name)}


class _References(cst.CSTVisitor):
    """Collects every name that is read, except inside its own definition."""

    def __init__(self, own: str | None) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._own = own

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        if node.value != self._own:
            self.names.add(node.value)


def _referenced(module: cst.Module) -> set[str]:
    found: set[str] = set()
    for statement in module.body:
        references = _References(_defines(statement))
        statement.visit(references)
        found |= references.names
    return found


def _blanked(source: bytes, symbols: Collection[str], path: str) -> bytes:
    if not symbols:
        return source
    return blank(source.decode("utf-8"), symbols, path).encode("utf-8")


def _with_packages(paths: Iterable[str]) -> set[str]:
    """Return paths, and the `__init__.py` of every folder above each of them."""
    plain = [PurePosixPath(path) for path in paths]
    folders = {folder for path in plain for folder in path.parents}
    return {str(path) for path in plain} | {str(folder / "__init__.py") for folder in folders}


def _below(folder: Path) -> dict[str, bytes]:
    found: Mapping[str, Path] = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file() and "__pycache__" not in name}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be read: {error}", "mend the manifest that names it") from error
