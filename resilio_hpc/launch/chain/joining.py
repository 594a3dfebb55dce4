"""Whether nodes of another job may join a run, and what they need to know of it.

The leading supervisor of each job of a run writes ``launch.json`` (0600) to the run directory; a joiner takes from it
everything that the run's own command line said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import resilio_hpc
from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import Untrusted, UsageError, os_error_text
from resilio_hpc.launch.allocation.placements import Site
from resilio_hpc.launch.chain.continuation_policy import CONTINUES
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.launch.rundir.controller_view import ControllerView
from resilio_hpc.launch.rundir.run_directory import RunIdentity
from resilio_hpc.slurm.chain import chain

FILE = "launch.json"
LOOPBACK = "127.0.0.1"


class LaunchRecord(msgspec.Struct, frozen=True):
    """``launch.json``. ``key``: the part of the run that this job is (``Site.key``); ``cwd``: where its ranks start."""

    key: str
    job: str
    options: LaunchOptions
    cwd: str
    chained: bool
    package: str = resilio_hpc.__version__
    v: int = 1


def record_of(options: LaunchOptions, site: Site, chained: bool) -> LaunchRecord:
    """Return what the leading supervisor writes for joiners."""
    return LaunchRecord(site.key, site.job, replace(options, notify=()), str(Path.cwd()), chained)


def write_record(run_path: Path, record: LaunchRecord) -> None:
    """Replace ``launch.json``: the newest job of the run is the one that can be joined."""
    write_atomic(run_path / FILE, msgspec.json.encode(record), mode=0o600)


def read_record(run_path: Path) -> LaunchRecord | None:
    """Return the newest job's record; None without one. Raises UsageError for one that is not valid."""
    path = run_path / FILE
    try:
        data = trusted_files.read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"--join: {path} cannot be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(data, type=LaunchRecord)
    except msgspec.MsgspecError:
        package = Fragment.package_of(data)
        raise UsageError(
            f"--join: {path} was written by resilio_hpc {package}, this is {resilio_hpc.__version__}: use the run's own"
        ) from None


class Fragment(msgspec.Struct):
    """The fields of another version's record that can be read."""

    package: str = "of another version"

    @classmethod
    def package_of(cls, data: bytes) -> str:
        """Return the version that wrote the record."""
        try:
            return msgspec.json.decode(data, type=cls).package
        except msgspec.MsgspecError:
            return cls().package


def find_run(path: Path) -> RunIdentity:
    """Return the run of a directory. Raises UsageError if it has none, or other users can change it."""
    if not path.is_dir():
        raise UsageError(f"--join {path}: there is no such run directory")
    try:
        return run_directory.read_run(trusted_files.run_directory(path))
    except Untrusted as error:
        raise Untrusted(f"--join {path}: {error}") from None
    except FileNotFoundError:
        raise UsageError(f"--join {path}: no run was started in this directory (it holds no run.json)") from None
    except OSError as error:
        raise UsageError(f"--join {path}: {os_error_text(error, str(path))}") from None


class Facts(Struct, frozen=True):
    """What the run directory shows now. ``verdict``: of the record's part; ``endpoint``: the newest controller's."""

    record: LaunchRecord | None
    verdict: Mapping[str, Any] | None
    has_next_job: bool
    leads: bool  # a controller's pulse was seen to move
    endpoint: str
    agents: tuple[str, ...]


def look(run_path: Path, view: ControllerView) -> Facts:
    """Read what ``judge`` needs. The caller keeps ``view`` between looks."""
    record = read_record(run_path)
    verdict = run_directory.read_verdict(run_path, record.key) if record else None
    jobs = [link.job for link in chain.read_links(run_path)]
    has_next = record is not None and record.job in jobs[:-1]
    leads = view.look()
    epoch = run_directory.newest_epoch(run_path)
    leads = leads and epoch is not None and record is not None and epoch.job == record.key
    return Facts(record, verdict, has_next, leads, epoch.endpoint if epoch else "", view.agents if leads else ())


def judge(facts: Facts, path: Path, nodes: Sequence[str], on_this_machine: bool) -> str:
    """Return why to wait, or "" when the nodes may join. Raises UsageError when they never may. Pure."""
    record, verdict = facts.record, facts.verdict
    if record is None:
        return "the run has not begun"
    if record.package != resilio_hpc.__version__:
        raise UsageError(
            f"--join: the run uses resilio_hpc {record.package}, this is {resilio_hpc.__version__}: use the run's own"
        )
    if verdict is not None:
        name = str(verdict.get("verdict"))
        if name in CONTINUES and facts.has_next_job:
            return "the run waits for the next job of its chain"
        raise UsageError(f"--join {path}: the run is over ({name.replace('_', ' ')}): start it again with --run-dir")
    if not facts.leads:
        return "the run has no controller just now"
    if on_this_machine != facts.endpoint.startswith(f"{LOOPBACK}:"):
        here = "outside of Slurm, on one machine" if facts.endpoint.startswith(LOOPBACK) else "in Slurm"
        raise UsageError(f"--join {path}: the run lives {here}, and can be joined from there only")
    if taking_part := sorted(set(nodes) & set(facts.agents)):
        raise UsageError(
            f"--join {path}: {', '.join(taking_part)} already takes part in this run: "
            f"ask for other nodes (sbatch --exclude={','.join(taking_part)})"
        )
    return ""


def options_for(record: LaunchRecord, run_path: Path, local_nodes: int, join_timeout_s: float) -> LaunchOptions:
    """Return the run's options as the joiner's agents get them."""
    return replace(
        record.options, run_dir=str(run_path), local_nodes=local_nodes, standalone=False,
        output=replace(record.options.output, view=False), join_timeout_s=join_timeout_s,
    )  # fmt: skip
