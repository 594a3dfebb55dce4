"""``resilio doctor`` as a command, on this machine or on one that lines of shell have broken in its namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.environments import SUPPORT, scrubbed
from tests.support.requirements import need_mounts, need_program
from tests.support.waiting import PATIENCE_S

REFUSING = SUPPORT / "doctor" / "refusing.py"
COMMAND = (sys.executable, "-m", "resilio_hpc.cli.main", "doctor")
_NAMESPACES = {"mount": "--mount", "net": "--net", "uts": "--uts"}


@dataclass(frozen=True)
class Said:
    """What ``resilio doctor --json`` said."""

    code: int
    found: dict[str, Any]

    def all(self, name: str) -> list[dict[str, Any]]:
        """The findings of a check."""
        return [one for one in self.found["checks"] if one["name"] == name]

    def one(self, name: str) -> dict[str, Any]:
        """The only finding of a check."""
        (found,) = self.all(name)
        return found

    def named(self) -> set[str]:
        """Checks that name something: a warning or a failure."""
        return {one["name"] for one in self.found["checks"] if one["state"] in ("warning", "failed")}


def doctor(
    *words: str,
    cwd: Path,
    setup: str = "",
    namespaces: Sequence[str] = (),
    wrapper: Sequence[str] = (),
    python: str = sys.executable,
    **variables: str | Path,
) -> Said:
    """Run the command. ``setup``: lines of shell that break something first, in these ``namespaces``."""
    if namespaces:
        need_mounts()
        need_program("ip", package="iproute2")
    inner = [*wrapper, python, *COMMAND[1:], "--json", *words]
    apart = ["unshare", *(_NAMESPACES[name] for name in namespaces)] if namespaces else []
    argv = [*apart, "sh", "-ec", f'{setup}\nexec "$@"', "sh", *inner]
    environment = scrubbed(**variables)
    environment["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"
    ran = subprocess.run(
        argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return Said(ran.returncode, json.loads(ran.stdout))


def packages_without(folder: Path, *left_out: str) -> Path:
    """Return an interpreter of an environment that has all packages of this one but some."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PATIENCE_S)
    ours = Path(next(path for path in sys.path if path.endswith("site-packages")))
    theirs = next((folder / "lib").glob("python*/site-packages"))
    for entry in ours.iterdir():
        if entry.name.partition("-")[0] not in left_out and entry.suffix != ".pth":
            (theirs / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
