"""What an agent must know of its run before anything else, kept on the node for agents that are started again.

The first agent on a node reads the run directory. A later one reads the copy in the node's private directory, since the
run directory may hang just then.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.rundir import node_directories, notify_targets, run_directory
from resilio_hpc.launch.rundir.notify_targets import Target
from resilio_hpc.launch.rundir.run_directory import RunIdentity

FILE = "identity.json"


class _Kept(msgspec.Struct, frozen=True):
    job: str
    secret: bytes
    targets: tuple[str, ...]


def identify(settings: AgentSettings) -> tuple[RunIdentity, tuple[Target, ...]]:
    """Return the run, and the job's notification targets. Raises what ``run_directory.read_run`` does."""
    path = Path(settings.options.run_dir)
    kept = _read(settings) if settings.run_id else None
    if kept is not None:
        return RunIdentity(path, settings.run_id, kept.secret), notify_targets.parsed(kept.targets)
    run = run_directory.read_run(path)
    targets = notify_targets.kept(path)
    _keep(run, settings, targets)
    return run, targets


def forget(directory: Path) -> None:
    """Remove the secret and the targets from a node's directory that is left behind. Raises nothing."""
    with contextlib.suppress(OSError):
        (directory / FILE).unlink()


def _directory(run_id: str, node: str) -> Path:
    return node_directories.local(run_id, node)


def _read(settings: AgentSettings) -> _Kept | None:
    try:
        data = trusted_files.read(_directory(settings.run_id, settings.node) / FILE)
        kept = msgspec.json.decode(data, type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None
    return kept if kept.job == settings.job else None  # another job of the run may have other targets


def _keep(run: RunIdentity, settings: AgentSettings, targets: tuple[Target, ...]) -> None:
    kept = _Kept(settings.job, run.secret, tuple(target.text for target in targets))
    with contextlib.suppress(FileNotFoundError):  # an abandoned directory, which is removed just now
        file = _directory(run.run_id, settings.node) / FILE
        write_atomic(file, msgspec.json.encode(kept), mode=0o600, durable=False)
