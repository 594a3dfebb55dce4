"""The shell commands of README.md and docs/, and how a test runs each page's, in order, in one shell.

Fences say what a block is: ``sh`` has commands, ``console`` commands behind ``$`` with what they print, ``bash`` a job
script, or a command of one. A page's `Rehearsal` says what stands in for the reader's own cluster and files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tests.support.environments import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Rehearsal(msgspec.Struct, frozen=True):
    """How a page's commands are run."""

    prepare: str = ""
    """What bash does first; ``wait_for COMMAND`` waits until the command succeeds."""

    swaps: Mapping[str, str] = {}
    """Words of the page, as regular expressions, and what `re.sub` puts in their place."""

    codes: Mapping[str, int] = {}
    """Exit codes other than 0, by the beginning of the command."""

    then: Mapping[str, str] = {}
    """What bash does after a command, by its beginning: the reader's waiting, or another terminal."""

    elsewhere: Mapping[str, str] = {}
    """Beginnings of commands that are not run here: which test runs them, or what they would need."""

    on_host: bool = False
    """Whether they run on this machine, not on a login node."""


def blocks(page: Path, *kinds: str) -> list[str]:
    """Return a page's fenced blocks of these kinds."""
    return [text for kind, text in _FENCED.findall(page.read_text()) if kind in kinds]


def commands(page: Path) -> list[str]:
    """Return the lines of a page that a reader types, in order; the Nth job script is submitted as ``job-N.sh``."""
    found: list[str] = []
    jobs = 0
    for kind, text in _FENCED.findall(page.read_text()):
        lines = text.splitlines()
        if kind == "console":
            found += [line[2:] for line in lines if line.startswith("$ ")]
        elif kind == "sh" or (kind == "bash" and not text.startswith("#")):
            found += [line.removeprefix("exec ") for line in lines if line.strip()]
        elif kind == "bash":
            found.append(f"sbatch --wait job-{jobs}.sh")
            jobs += 1
    return found


def job_scripts(page: Path) -> list[str]:
    """Return a page's job scripts."""
    return [text for text in blocks(page, "bash") if text.startswith("#")]


def of(table: Mapping[str, str] | Mapping[str, int], command: str) -> str | int | None:
    """Return what a table of beginnings has for a command."""
    return next((value for beginning, value in table.items() if command.startswith(beginning)), None)


def to_run(page: Path, rehearsal: Rehearsal) -> list[str]:
    """Return the commands of a page that are run here, as the page shows them."""
    return [command for command in commands(page) if of(rehearsal.elsewhere, command) is None]


_FUNCTIONS = """
wait_for() {
    for _ in $(seq 600); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done
    echo "waited for: $*" >&2
    exit 9
}
committed() { resilio ledger "$1" --event committed | grep -q committed; }
"""


def shell_script(page: Path, rehearsal: Rehearsal) -> str:
    """Return bash that runs a page's commands in this directory; ``N.out`` has the Nth's output and exit code."""

    def swapped(text: str) -> str:
        for word, stand_in in rehearsal.swaps.items():
            text = re.sub(word, stand_in, text)
        return text

    lines = [_FUNCTIONS, *(f"cat > job-{n}.sh <<'END'\n{swapped(text)}END" for n, text in enumerate(job_scripts(page)))]
    lines.append(rehearsal.prepare)
    for n, command in enumerate(to_run(page, rehearsal)):
        lines.append(f'{{ {swapped(command)}\n}} > {n}.out 2>&1 </dev/null; echo "exit code $?" >> {n}.out')
        lines.append(str(of(rehearsal.then, command) or ""))
    return "\n".join(lines)


def failures(page: Path, rehearsal: Rehearsal, folder: Path) -> list[str]:
    """Return what went otherwise than the page says, after `shell_script` ran in ``folder``."""
    wrong = []
    for n, command in enumerate(to_run(page, rehearsal)):
        path = folder / f"{n}.out"
        said = path.read_text(errors="replace") if path.exists() else "was not run"
        if said.splitlines()[-1:] != [f"exit code {of(rehearsal.codes, command) or 0}"] or "Traceback" in said:
            wrong.append(f"$ {command}\n{said}")
    return wrong


def quoted(text: str, path: str) -> str:
    """Return bash that writes a file."""
    return f"printf %s {shlex.quote(text)} > {path}\n"
