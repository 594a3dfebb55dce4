"""CRIU on this machine: where it is, and whether its own check says that processes can be dumped and restored."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import run

LIMIT_S = 5.0


def find(environment: Mapping[str, str]) -> str:
    """Return the program's path; "" where there is none."""
    return shutil.which("criu", path=environment.get("PATH")) or ""


def for_this_user() -> tuple[str, ...]:
    """Return the option of its commands without which it refuses other users than root."""
    return ("--unprivileged",) if os.geteuid() else ()


def version(program: str) -> str:
    """Return its version's number, "" where its answer has none. Raises CommandError."""
    found = re.search(r"\d+(\.\d+)*", run([program, "--version"], LIMIT_S).stdout)
    return found.group() if found else ""


def why_not(program: str) -> str:
    """Return why its check fails, in its own words; "" where kernel and rights suffice."""
    try:
        run([program, "check", *for_this_user()], LIMIT_S)
    except CommandError as error:
        if error.returncode is None:
            return f"no answer within {LIMIT_S:g} s"
        return first_error(error.stdout + error.stderr) or str(error)
    return ""


def first_error(output: str) -> str:
    """Return the first of its errors that stops it: what follows comes of it. "" where there is none.

    It says that it could not raise its own limit of open files, and goes on without.
    """
    lines = [line for line in output.splitlines() if "Error (" in line]
    told = [line for line in lines if "exited" not in line and "for self" not in line]
    return re.sub(r"^.*?Error \([^)]*\): ", "", told[0]) if told else ""
