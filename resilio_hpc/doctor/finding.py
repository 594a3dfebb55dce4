"""What a check looks at, and what it says: plain data."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


class DoctorState(enum.Enum):
    """How a part of the machine stands. Only FAILED keeps a launch, or its checkpoints, from working."""

    OK = "ok"
    NOTICE = "notice"
    WARNING = "warning"
    FAILED = "failed"
    NOT_HERE = "not here"


@dataclass(frozen=True)
class DoctorFinding:
    """One finding. ``seen``: on the machine; ``means``: for a launch or its checkpoints; ``todo``: one line.

    ``about``: the part of the check's subject, where it has several, such as a setting of Slurm.
    """

    state: DoctorState
    seen: str
    means: str = ""
    todo: str = ""
    about: str = ""


def ok(seen: str) -> DoctorFinding:
    """Return the finding that all is as it should be."""
    return DoctorFinding(DoctorState.OK, seen)


def not_here(seen: str) -> DoctorFinding:
    """Return the finding that the machine has nothing of the kind."""
    return DoctorFinding(DoctorState.NOT_HERE, seen)


def notice(seen: str, means: str, todo: str) -> DoctorFinding:
    """Return a finding that costs speed or comfort, and nothing else."""
    return DoctorFinding(DoctorState.NOTICE, seen, means, todo)


def warning(seen: str, means: str, todo: str) -> DoctorFinding:
    """Return a finding that harms some runs."""
    return DoctorFinding(DoctorState.WARNING, seen, means, todo)


def failed(seen: str, means: str, todo: str) -> DoctorFinding:
    """Return a finding with which launches, or their checkpoints, fail."""
    return DoctorFinding(DoctorState.FAILED, seen, means, todo)


@dataclass(frozen=True)
class DoctorView:
    """What checks look at. ``mark``: says which path or call is touched next, so that a hang can be traced to it."""

    environment: Mapping[str, str]
    run_dir: Path
    local_checkpoints: Path | None = None
    recovery_limit_s: float = 30.0
    mark: Callable[[str], None] = lambda _: None

    @property
    def in_job(self) -> bool:
        """Return whether this is a job of Slurm's."""
        return bool(self.environment.get("SLURM_JOB_ID"))

    @property
    def slurm_conf(self) -> Path | None:
        """Return Slurm's configuration file, if this machine has one."""
        given = self.environment.get("SLURM_CONF")
        places = (
            [given] if given else ["/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf"]
        )
        return next((Path(place) for place in places if os.access(place, os.R_OK)), None)

    @property
    def has_slurm(self) -> bool:
        """Return whether this is a machine of a Slurm cluster, as far as its own files tell."""
        return self.in_job or self.slurm_conf is not None


Look = Callable[[DoctorView], "DoctorFinding | list[DoctorFinding]"]


@dataclass(frozen=True)
class DoctorCheck:
    """A check: a line of the registry.

    ``looks_at``, ``matters``, ``helps``: for the documentation; ``needed``: whether launches fail without; ``after``:
    checks without which this one tells nothing; ``budget_s``: seconds after which it hangs.
    """

    name: str
    group: str
    look: Look
    looks_at: str
    matters: str
    needed: bool = False
    after: tuple[str, ...] = ()
    budget_s: float = 15.0
    helps: str = ""
