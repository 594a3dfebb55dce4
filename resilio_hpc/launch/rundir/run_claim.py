"""Turns: which part of which job, or which launch outside of Slurm, carries the run.

``links/turn.N.json``, each created exclusively, one after the other. A requeued job, the job that was submitted to
follow it, and one that a user started by hand may all want to go on. Each takes the next turn before it starts
anything; only one can, and the others learn whose job to ask Slurm about. A turn also tells the next job on which nodes
the part ran.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from msgspec import Struct, field, to_builtins

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import create_exclusive
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.launch.rundir.holder import Holder
from resilio_hpc.slurm.chain import chain

_NAME = re.compile(r"turn\.(\d+)\.json")
_LOCAL = re.compile(r"local-\d+-\d+")  # a launch outside of Slurm
_PART = re.compile(r"(\d+)(?:r(\d+))?(?:\.(\d+))?")


class Turn(Struct, frozen=True):
    """A turn: ``part`` of ``job`` carries the run on ``nodes``.

    ``committed``: the newest durable step when it began, or -1; ``holder``: the process of its launch.
    """

    number: int
    part: str
    job: str
    link: int
    nodes: tuple[str, ...]
    committed: int
    time: float
    holder: Holder = field(default_factory=Holder)


def part_name(job: str, restarts: int, launch: int) -> str:
    """Return ``12``; ``12r1`` when Slurm has requeued the job once; ``12r1.2`` for the second launch there. Pure."""
    return f"{job}r{restarts}.{launch}" if launch > 1 else f"{job}r{restarts}" if restarts else job


def job_of(part: str) -> str:
    """Return the job of a part; for a launch outside of Slurm, the part itself. Pure."""
    found = _PART.fullmatch(part)
    return found[1] if found else part


def run_of(part: str) -> int:
    """Return how often Slurm had requeued the job when the part began. Pure."""
    found = _PART.fullmatch(part)
    return int(found[2] or 0) if found else 0


def newest(run_path: Path, count: int = 1) -> list[Turn]:
    """Return the last turns, newest first, without damaged ones. Raises Untrusted."""
    found: list[Turn] = []
    for number in _numbers(run_path):
        turn = _read(_file(run_path, number))
        if turn is not None:
            found.append(turn)
        if len(found) == count:
            break
    return found


def next_number(run_path: Path) -> int:
    """Return the number that the next turn has."""
    return max(_numbers(run_path), default=0) + 1


def _numbers(run_path: Path) -> list[int]:
    found = [_NAME.fullmatch(path.name) for path in (run_path / "links").iterdir()]
    return sorted((int(match.group(1)) for match in found if match), reverse=True)


def take(run_path: Path, turn: Turn) -> bool:
    """Take a turn; False when another job has it. Raises OSError."""
    return create_exclusive(_file(run_path, turn.number), json.dumps({"v": 1, **to_builtins(turn)}).encode(), 0o644)


def _file(run_path: Path, number: int) -> Path:
    return run_path / "links" / f"turn.{number}.json"


def _read(file: Path) -> Turn | None:
    f = Fields.of(trusted_files.read_object(file))
    number, link, committed, at = f.whole("number"), f.whole("link"), f.whole("committed"), f.time("time")
    if (
        number is None
        or link is None
        or committed is None
        or at is None
        or not f.text("part")
        or not (chain.is_job(f.text("job")) or _LOCAL.fullmatch(f.text("job")))
    ):
        return None
    held = _holder(f.inner("holder"))
    return Turn(number, f.text("part"), f.text("job"), link, f.texts("nodes"), committed, at, held)


def _holder(fields: Fields) -> Holder:
    """Return the holder in a turn; an empty one for a turn of an older version."""
    pid, born = fields.whole("pid") or 0, fields.whole("born") or 0
    return Holder(fields.text("host"), pid, fields.text("kernel"), born, fields.text("within"))
