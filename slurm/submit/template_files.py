"""The places of templates: those of the package, and a site's or a user's own files."""

from __future__ import annotations

import difflib
from pathlib import Path

from resilio_hpc.core.errors import UsageError, os_error_text
from resilio_hpc.slurm.submit.template import Template, parse

FOLDER = Path(__file__).resolve().parents[1] / "sbatch_templates"  # a link to the checkout's folder; files in a wheel
SUFFIX = ".sbatch"
MAX_BYTES = 256 * 1024


def names() -> list[str]:
    """Return the templates of the package, by name."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def load(name: str) -> Template:
    """Return ``chained``, or the script at a path (with a ``/`` or ending in .sbatch). Raises UsageError."""
    if "/" not in name and not name.endswith(SUFFIX):
        known = names()
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(known)}"
            raise UsageError(f"no template is named {name!r}: {hint} (a file of your own: ./{name}{SUFFIX})")
        return read(FOLDER / f"{name}{SUFFIX}", name)
    return read(Path(name).expanduser(), Path(name).stem)


def read(path: Path, name: str) -> Template:
    """Return a script. Raises UsageError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"no such template: {os_error_text(error, str(path))}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"template {path}: larger than {MAX_BYTES >> 10} KiB, so it is no job script")
    try:
        return parse(name, data.decode())
    except UnicodeDecodeError:
        raise UsageError(f"template {path}: it is not UTF-8 text") from None


def having(key: str) -> list[str]:
    """Return the package's templates that have a setting of this name."""
    return [name for name in names() if any(setting.key == key for setting in load(name).settings)]
