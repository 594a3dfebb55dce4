"""Whether the ranks' program exists and is sound, without importing or running it."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import io
import os
import re
import shutil
import sys
import tokenize
import warnings
import zipimport
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from resilio_hpc.core.errors import UsageError

_LOADERS = re.compile(r"python[\d.]*|torchrun|srun|mpirun|mpiexec|accelerate|deepspeed|horovodrun")
_LOADER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_RUN_DIR = "RESILIO_RUN_DIR"
_MAX_SOURCE_BYTES = 8 * 1024 * 1024


def check_script(script: str, arguments: Sequence[str], cwd: Path) -> None:
    """Check a Python script (or a directory or archive with a ``__main__``): readable, without syntax errors."""
    path = cwd / script
    try:
        if path.is_dir():
            if not (path / "__main__.py").is_file():
                raise UsageError(f"{script} is a directory (without __main__.py): name the script in it")
            return
        if path.is_symlink() and not path.exists():
            raise UsageError(f"{script} is a link to nowhere ({path.readlink()})")
        if not path.exists():
            raise UsageError(f"script {script!r} does not exist{_hint(script, arguments, cwd)}")
        if not path.is_file():
            raise UsageError(f"{script} is not a file that Python could run")
        with open(path, "rb") as file:
            source = file.read(_MAX_SOURCE_BYTES)
    except PermissionError:
        raise UsageError(f"{script} cannot be read: permission denied for this user") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UsageError(f"{script!r} cannot be read: {getattr(error, 'strerror', error)}") from None
    if script.endswith(".pyc"):
        if not source.startswith(importlib.util.MAGIC_NUMBER):
            raise UsageError(f"{script} was not compiled by this Python ({sys.version.split()[0]}): name its source")
        return
    if _is_archive(path, script):
        return
    if source.startswith(b"\x7fELF") or re.match(rb"#!(?!.*python)", source):
        raise UsageError(f"{script} is not a Python script: add --no-python to run it as a command")
    check_syntax(source, script)


def hydra_notes(script: str, arguments: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """Return a note on a Hydra script whose output directory is another one after each restart, where that is seen.

    Its checkpoints are not found there again. A directory that stays is named by a word, or in its configuration.
    """
    try:
        text = (cwd / script).read_text(errors="replace")
        main = re.search(r"@hydra\.main\(([^)]*)\)", text)
        if main is None or any(word.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for word in arguments):
            return ()
        named = dict(re.findall(r"""config_(path|name)\s*=\s*["']([^"']+)""", main[1]))
        folder = (cwd / script).parent / named.get("path", "")
        if _RUN_DIR in (folder / f"{named.get('name', 'config').removesuffix('.yaml')}.yaml").read_text():
            return ()
    except FileNotFoundError:
        pass  # of the configuration
    except (OSError, ValueError):
        return ()
    return (
        f"{script} uses Hydra, which makes another output directory at each restart: for checkpoints there, add "
        f"'hydra.run.dir=${{oc.env:{_RUN_DIR}}}/hydra' behind the script (docs/frameworks.md)",
    )


def _is_archive(path: Path, script: str) -> bool:
    """Return whether Python would run it as an archive, which it knows by its end: a #! line may come first."""
    try:
        archive = zipimport.zipimporter(str(path))
    except (zipimport.ZipImportError, OSError, ValueError):
        return False
    if archive.find_spec("__main__") is None:
        raise UsageError(f"{script} is an archive without __main__.py: name the script to run")
    return True


def check_syntax(source: bytes, name: str) -> None:
    """Raise UsageError, two lines long, for the first syntax error of a Python source."""
    if len(source) >= _MAX_SOURCE_BYTES:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, name, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise UsageError(_syntax_words(error, source, name)) from None
        except ValueError as error:
            raise UsageError(f"{name} is not Python source: {error}") from None
        except (RecursionError, MemoryError):
            return  # too deep for this compiler; that does not prove that it is wrong


def _syntax_words(error: SyntaxError, source: bytes, name: str) -> str:
    line = (error.text or "").strip()
    if not line and error.lineno:
        try:
            encoding = tokenize.detect_encoding(io.BytesIO(source).readline)[0]
            line = source.decode(encoding, "replace").splitlines()[error.lineno - 1].strip()
        except (SyntaxError, IndexError, LookupError):
            line = ""
    where = f"{name}, line {error.lineno}" if error.lineno else name
    return f"{where}: {error.msg}" + (f"\n    {line[:100]}" if line else "")


def _hint(script: str, arguments: Sequence[str], cwd: Path) -> str:
    """Return a hint at what the user may have meant."""
    name = Path(script).name
    if script != script.strip():
        return ": its name ends or begins with white space (a Windows line end, or a space after a backslash?)"
    if script == "=" or script.startswith("="):
        return ": write --flag=value or --flag value, without spaces around ="
    if _LOADERS.fullmatch(name):
        rest = _program(arguments, cwd)
        return f": leave {name!r} out (resilio-launch {rest}), the ranks are Python processes already"
    if "$" in script or "~" in script:
        return ": the shell did not expand it (quotes?)"
    if (
        "." in script
        and "/" not in script
        and not script.endswith(".py")
        and (cwd / (script.replace(".", "/") + ".py")).exists()
    ):
        return f": to run a module, write -m {script}"
    if near := _nearest(name, (cwd / script).parent):
        return f": did you mean {Path(script).with_name(near)}?"
    for folder in (cwd, cwd.parent, *_folders(cwd)):
        if (folder / name).is_file():
            return f": did you mean {os.path.relpath(folder / name, cwd)}?"
    if not Path(script).is_absolute():
        return f" in {cwd}"
    return ""


def _program(arguments: Sequence[str], cwd: Path) -> str:
    """Return the script or module behind a loader and its flags, as far as it is known."""
    for before, word in zip(("", *arguments), arguments, strict=False):
        if before == "-m" and word not in _LOADER_MODULES:
            return f"-m {word}"
        if not word.startswith("-") and (word.endswith(".py") or "/" in word or (cwd / word).is_file()):
            return word
    return "train.py"


def _nearest(name: str, folder: Path) -> str:
    suffixes = (".py", Path(name).suffix or ".py")
    scripts = [entry for entry in _names(folder) if entry.endswith(suffixes)]
    return next(iter(difflib.get_close_matches(name, scripts, 1, 0.6)), "")


def _folders(cwd: Path) -> Iterable[Path]:
    visible = [cwd / entry for entry in _names(cwd)[:1000] if not entry.startswith(".")]
    return [path for path in visible if path.is_dir()]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def check_command(command: str, environment: Mapping[str, str], cwd: Path) -> None:
    """Check that it is an executable, by path or on PATH."""
    if shutil.which(command if "/" not in command else str(cwd / command), path=environment.get("PATH")):
        return
    path = cwd / command
    if path.is_dir():
        raise UsageError(f"command {command!r} is a directory")
    if path.is_file():
        if "/" not in command:
            raise UsageError(f"command {command!r} is not on PATH; the file in this directory is ./{command}")
        raise UsageError(f"command {command!r} is not executable: chmod +x {command}")
    raise UsageError(f"command {command!r} was not found{'' if '/' in command else ' on PATH'}")


def check_module(module: str, cwd: Path, search: Sequence[str] | None = None) -> None:
    """Check that ``python -m`` would find it in ``cwd`` or on ``sys.path``, without importing its packages."""
    if module.endswith(".py") or "/" in module:
        stem = module.removesuffix(".py").replace("/", ".").strip(".")
        raise UsageError(f"-m {module}: a module is named like {stem}; to run the file leave -m out")
    if not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"-m {module!r} is not the name of a module")
    places: Sequence[str] | None = [str(cwd), *(sys.path if search is None else search)]
    spec: importlib.machinery.ModuleSpec | None = None
    found = ""
    for part in module.split("."):
        name = f"{found}.{part}" if found else part
        if places is None:
            raise UsageError(f"-m {module}: {found} is a module, not a package, so it holds no {part!r}")
        spec = _find(name, places, top=not found)
        if spec is None:
            near = difflib.get_close_matches(part, _modules(places if found else [str(cwd)]), 1, 0.6)
            inside = f" in package {found}" if found else ""
            hint = f": did you mean {f'{found}.' * bool(found)}{near[0]}?" if near else f"{inside} (looked from {cwd})"
            raise UsageError(f"-m {module}: no module named {name!r}{hint}")
        found, places = name, spec.submodule_search_locations
    if places is not None:
        spec = _find(f"{module}.__main__", places, top=False)
        if spec is None:
            raise UsageError(f"-m {module}: a package without __main__ cannot be run; name a module in it")
    if spec is not None and spec.origin and spec.origin.endswith(".py") and spec.has_location:
        check_syntax(Path(spec.origin).read_bytes(), os.path.relpath(spec.origin, cwd))


def _find(name: str, places: Sequence[str], top: bool) -> importlib.machinery.ModuleSpec | None:
    spec = importlib.machinery.PathFinder.find_spec(name, places)
    if spec is None and top:
        for finder in sys.meta_path:  # built-in and frozen modules, editable installs
            find = getattr(finder, "find_spec", None)
            spec = find(name, None) if find else None
            if spec is not None:
                break
    return spec


def _modules(places: Sequence[str]) -> list[str]:
    names = [name for place in places for name in _names(Path(place))]
    return [name.removesuffix(".py") for name in names if name[:1] not in "._"]
