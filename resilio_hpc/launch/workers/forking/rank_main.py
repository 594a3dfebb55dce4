"""Become a user's script: ``__main__``, its arguments and paths, and the report of an uncaught exception.

It is used in a forked rank, and run as a file (``python -u rank_main.py script train.py …``) in one that is executed
again. It imports nothing of this package at the top, because it also runs where only the standard library is available.
"""

from __future__ import annotations

import builtins
import functools
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import traceback
import types
import zipimport
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SAFE_PATH = bool(getattr(sys.flags, "safe_path", False))  # since Python 3.11


def run(kind: str, argv: Sequence[str]) -> None:
    """Run ``argv[0]``, a script's path ("script") or a module's name ("module"), as ``python -u`` would.

    Return or raise SystemExit as the program does. An uncaught exception is printed without this package's frames and
    recorded in the file that ``TORCHELASTIC_ERROR_FILE`` names, then becomes SystemExit(1).
    """
    rank = os.getpid()  # a child that the program forks comes back here, too, and its end is not the rank's
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __loader__=None, __package__=None)
    sys.modules["__main__"] = main
    sys.argv = list(argv)
    _rank_error()
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if kind == "module" else []), *argv]
    try:
        if kind == "module":
            _set_first_path(str(Path.cwd()))
            runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]  # what `python -m` itself calls
        elif is_package(argv[0]):
            _set_first_path(_full(argv[0]), always=True)
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # a directory or a zip file
        else:
            _set_first_path(str(Path(argv[0]).resolve().parent))
            _run_file(argv[0], main)
    except SystemExit as end:
        if os.getpid() == rank:
            if end.code not in (None, 0):
                _rank_error().end_of(end)
                _save_last_step(end)
            _tell_of_end(end.code)
            _leave_mpi(end.code)
        raise
    except BaseException as error:  # noqa: BLE001 - the last handler of the process
        _end(error, main, os.getpid() == rank)
    else:
        if os.getpid() == rank:
            _tell_of_end(0)


def own_place(kind: str, program: str) -> str:
    """Return the first entry of the program's ``sys.path``; "" where the interpreter is told to have none (-P)."""
    if kind == "script" and is_package(program):
        return _full(program)
    if _SAFE_PATH:
        return ""
    return str(Path.cwd() if kind == "module" else Path(program).resolve().parent)


def shadowed(places: Sequence[str]) -> list[str]:
    """Return loaded top-level modules that an import with ``places`` first on the path would find elsewhere.

    Built-in and frozen modules come before any path.
    """
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if "." in name or name == "__main__" or spec is None or spec.origin in ("built-in", "frozen"):
            continue
        other = importlib.machinery.PathFinder.find_spec(name, list(places))
        if other is None or other.origin is None or not spec.origin:
            continue  # a directory without __init__.py comes last, after the whole path
        if os.path.realpath(other.origin) != os.path.realpath(spec.origin):
            found.append(name)
    return sorted(found)


def _forget(names: Sequence[str]) -> None:
    """Let the program import its own modules of these names; earlier importers keep the others."""
    for loaded in list(sys.modules):
        if loaded.partition(".")[0] in names:
            del sys.modules[loaded]


def _set_first_path(entry: str, always: bool = False) -> None:
    if always or not _SAFE_PATH:
        sys.path.insert(0, entry)


def is_package(path: str) -> bool:
    """Return whether the path is a directory or an archive, which the interpreter knows by its suffix.

    What comes before it does not matter.
    """
    if Path(path).is_dir():
        return True
    try:
        zipimport.zipimporter(path)
    except (zipimport.ZipImportError, OSError, ValueError):
        return False
    return True


def _full(path: str) -> str:
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - not normalised, as with `python path`


def _run_file(path: str, main: types.ModuleType) -> None:
    full = _full(path)
    try:
        with io.open_code(full) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {full!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    compiled = importlib.machinery.SourcelessFileLoader("__main__", full) if path.endswith(".pyc") else None
    main.__dict__.update(
        __file__=full,
        __cached__=None,
        __loader__=compiled or importlib.machinery.SourceFileLoader("__main__", full),
        __spec__=None,
    )
    code = compiled.get_code("__main__") if compiled else compile(source, full, "exec", dont_inherit=True)
    assert code is not None
    exec(code, main.__dict__)


def _end(error: BaseException, main: types.ModuleType, is_rank: bool) -> None:
    """Do what the interpreter does with an uncaught exception; finalisation follows in the caller's caller."""
    met = error
    error, _ = _rank_error().end_of(error)
    shown = error.__traceback__ = met.__traceback__ = _user_frames(error.__traceback__, main)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, shown
    sys.last_exc = error  # type: ignore[attr-defined]  # Python 3.12
    if is_rank:
        _record(error)
    try:
        sys.excepthook(type(error), error, shown)
    except BaseException:  # noqa: BLE001 - a user's hook may raise anything
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc()
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, shown)
    if is_rank:
        _save_last_step(error)
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # it was shown already; the interpreter finalises and then dies of SIGINT
        raise KeyboardInterrupt from None
    if is_rank:
        _tell_of_end(1)
        _leave_mpi(1)
    sys.exit(1)


def _tell_of_end(code: object) -> None:
    """Write that the program is over, with this exit code. What is left, threads and libraries may make long."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        number = code & 255 if isinstance(code, int) else int(code is not None)
        try:
            Path(path).with_suffix(".ends").write_text(f"{os.getpid()} {number}")
        except OSError:
            return  # the disk is full: this end is seen when the process is gone


def _save_last_step(error: BaseException) -> None:
    """Save the last finished step, where the script has said how: this rank may be the only one that has its part."""
    module = sys.modules.get("resilio_hpc.train.last_step")
    if module is not None:
        module.save_before_end(error)


def _leave_mpi(code: object) -> None:
    """End a rank that failed, without MPI_Finalize, which mpi4py calls at exit.

    MPI_Finalize would wait for its peers, which wait for it. PMI tells them of its sudden end.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if code in (None, 0) or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if not isinstance(code, int):
        print(code, file=sys.stderr)  # sys.exit prints any other value
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 255 if isinstance(code, int) else 1)


def _user_frames(shown: types.TracebackType | None, main: types.ModuleType) -> types.TracebackType | None:
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while shown is not None and shown.tb_frame.f_code.co_filename in own:
        shown = shown.tb_next
    return shown


def _record(error: BaseException) -> None:
    """Write torchrun's error file, unless the script did so itself."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or isinstance(error, KeyboardInterrupt):
        return
    try:
        _rank_error().write_error(Path(path), error)
    except Exception as failure:  # noqa: BLE001 - the script may have broken imports; its own error must be shown
        print(f"cannot write the error file {path}: {failure}", file=sys.stderr)


@functools.cache
def _rank_error() -> Any:
    """Return what reports errors. It is loaded before the program: at its end the file system may be gone."""
    return sys.modules.get("resilio_hpc.core.rank_error") or _of_core("rank_error")


def _of_core(name: str) -> Any:
    """Return a module, loaded by its file's path: this package may not be installed for the script's Python."""
    file = Path(__file__).parents[3] / "core" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_resilio_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _of_core("gloo_groups").keep_alive_when_imported()
    _of_core("stack_dump").write_when_asked()
    _of_core("process_title").show_rank(sys.argv[1], sys.argv[2:], os.environ.get("RESILIO_TREE_TOKEN", ""))
    if not _SAFE_PATH:
        del sys.path[0]  # this file's own directory
    _place = own_place(sys.argv[1], sys.argv[2])
    _forget(shadowed([_place] if _place else []))
    run(sys.argv[1], sys.argv[2:])
