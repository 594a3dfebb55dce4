"""Whether a script sets variables that torch reads on load, before it imports torch. It is read, not run.

A forked rank has torch loaded already, so such a setting would come too late: it is executed instead. The text shows
it: writes to ``os.environ`` that stand before the first import of torch at the top level of the script, and those in
modules beside it that are imported before that. A write in a function does not count, unless the function is called
there.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
import zipimport
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct, field

from resilio_hpc.launch.workers.forking import load_time_variables

MAX_FILES = 200
MAX_BYTES = 4 << 20  # of all files together
UNKNOWN = "variables of os.environ"
_SETTERS = {"setdefault", "update", "__setitem__", "putenv"}
_DOTENV = {"dotenv", "environs", "decouple"}  # modules that fill os.environ from a file


class _Scan(Struct):
    places: tuple[str, ...]
    loaded: frozenset[str]
    environment: Mapping[str, str]
    any_name: bool
    found: dict[str, None] = field(default_factory=dict)
    seen: dict[str, bool] = field(default_factory=dict)  # file → whether it imports what is loaded
    bytes: int = 0


def settings(
    files: Iterable[Path],
    places: Collection[str],
    loaded: Collection[str],
    environment: Mapping[str, str],
    any_name: bool = False,
) -> tuple[str, ...]:
    """Names of load-time variables that a program gives another value than ``environment`` has, or ``UNKNOWN``.

    ``files``: what runs, in this order: the script, or ``files_of_module``.
    ``places``: directories whose modules are the user's own. ``loaded``: top-level modules, which end the search
    when they are imported. ``any_name``: every variable may count. Raises nothing: what cannot be read sets nothing.
    """
    scan = _Scan(tuple(places), frozenset(loaded), environment, any_name)
    for file in files:
        if _scan_file(scan, file):
            break
    return tuple(scan.found)


def files_of_module(module: str, places: Collection[str]) -> list[Path]:
    """Return the files that ``python -m module`` runs: its packages and itself, in ``places`` or as installed."""
    search = [*places, *sys.path]
    return [*_files(module, search), *_files(f"{module}.__main__", search)]


def _scan_file(scan: _Scan, path: Path) -> bool:
    """Note which variables the file sets. Return whether it imports what is loaded: nothing after that counts."""
    name = str(path)
    if name in scan.seen:
        return scan.seen[name]
    scan.seen[name] = False  # for the time of the scan, since imports may form a cycle
    if len(scan.seen) > MAX_FILES or scan.bytes > MAX_BYTES:
        return False
    try:
        source = _read(path)
        scan.bytes += len(source)
        if path.suffix == ".pyc":  # a .pyc has no text to read
            if b"environ" in source:
                scan.found[UNKNOWN] = None
            return False
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node, runs_now in _in_order(tree.body, True):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if _scan_import(scan, node, path) and runs_now:
                scan.seen[name] = True
                return True
        else:
            for variable in _written(node, scan):
                scan.found[variable] = None
    return False


def _read(path: Path) -> bytes:
    """Return a source file, perhaps one in an archive. Raises OSError."""
    try:
        return path.read_bytes()
    except NotADirectoryError:
        archive = next(parent for parent in path.parents if parent.is_file())
        return zipimport.zipimporter(str(archive)).get_data(str(path))


def _in_order(body: list[ast.stmt], runs_now: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield imports, assignments and calls in the order of the text.

    False for what stands in a function.
    """
    for statement in body:
        yield from _flat(statement, runs_now)


def _flat(node: ast.AST, runs_now: bool) -> Iterator[tuple[ast.AST, bool]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_for_types(node):
        runs_now = False
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AugAssign | ast.Call):
        yield node, runs_now
    for child in ast.iter_child_nodes(node):
        yield from _flat(child, runs_now)


def _is_for_types(node: ast.AST) -> bool:
    """Return whether the statement is ``if TYPE_CHECKING:``, which never runs."""
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def _scan_import(scan: _Scan, node: ast.Import | ast.ImportFrom, path: Path) -> bool:
    """Return whether it imports a loaded module, directly or through a module of the user's own."""
    if isinstance(node, ast.Import):
        names, places = [alias.name for alias in node.names], scan.places
    else:
        base = node.module or ""
        names = [base] if base else []
        names += [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
        places = scan.places if not node.level else (str(path.parents[node.level - 1]),)
    loads = False
    for name in names:
        top = name.partition(".")[0]
        if not isinstance(node, ast.ImportFrom) or not node.level:
            if top in scan.loaded:
                loads = True
                continue
            if top in _DOTENV:
                scan.found[UNKNOWN] = None
        for file in _files(name, places):
            loads |= _scan_file(scan, file)
    return loads


def _files(name: str, places: Collection[str]) -> Iterator[Path]:
    """Yield source files that an import of ``name`` runs, of those below ``places``."""
    search: list[str] | None = list(places)
    for part in name.split("."):
        if not search:
            return
        try:
            spec = importlib.machinery.PathFinder.find_spec(part, search)
        except (ImportError, ValueError, OSError):
            return
        if spec is None:
            return
        if spec.origin and spec.origin.endswith(".py"):
            yield Path(spec.origin)
        search = list(spec.submodule_search_locations) if spec.submodule_search_locations else None


def _written(node: ast.AST, scan: _Scan) -> Iterator[str]:
    """Yield names of variables that a statement or call sets to another value."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _if_counts(target.slice, node.value, scan)
            elif isinstance(node, ast.AugAssign) and _is_environ(target):  # os.environ |= {…}
                yield from _of_mapping(node.value, scan)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SETTERS:
        if node.func.attr == "putenv":
            if node.args and isinstance(node.func.value, ast.Name) and node.func.value.id == "os":
                yield from _if_counts(node.args[0], node.args[1] if len(node.args) > 1 else None, scan)
        elif not _is_environ(node.func.value):
            return
        elif node.func.attr == "update":
            for argument in node.args:
                yield from _of_mapping(argument, scan)
            for keyword in node.keywords:
                name = ast.Constant(keyword.arg) if keyword.arg else keyword.value
                yield from _if_counts(name, keyword.value, scan)
        elif node.args:
            value = node.args[1] if len(node.args) > 1 else None
            yield from _if_counts(node.args[0], value, scan, default=node.func.attr == "setdefault")


def _of_mapping(mapping: ast.expr, scan: _Scan) -> Iterator[str]:
    if isinstance(mapping, ast.Dict):
        for name, value in zip(mapping.keys, mapping.values, strict=True):
            yield from _if_counts(name or value, value, scan)
    elif isinstance(mapping, ast.Call) and isinstance(mapping.func, ast.Name) and mapping.func.id == "dict":
        for keyword in mapping.keywords:
            yield from _if_counts(ast.Constant(keyword.arg), keyword.value, scan)
    else:
        yield UNKNOWN


def _if_counts(name: ast.expr, value: ast.expr | None, scan: _Scan, default: bool = False) -> Iterator[str]:
    """Yield the name, if the loaded libraries would have read it and its value has changed."""
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        yield UNKNOWN
        return
    known = scan.environment.get(name.value)
    if not (scan.any_name or load_time_variables.read_by_libraries(name.value)):
        return
    if known is not None and (default or (isinstance(value, ast.Constant) and value.value == known)):
        return
    yield name.value


def _is_environ(node: ast.expr) -> bool:
    """Return whether the expression is ``os.environ`` or ``environ``, also by another name for os."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "environb")
    return isinstance(node, ast.Name) and node.id in ("environ", "environb")
