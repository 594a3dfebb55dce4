"""A cluster's files on the host: written before it starts, removed when it is gone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.devtools.devcluster import control, processes, slurm_conf
from resilio_hpc.devtools.devcluster.spec import ROOTS, USER, USER_ID, ClusterPaths, ClusterSpec, base_directory, layout


def names() -> list[str]:
    """Return the names of all clusters that have state on this host, running or not."""
    base = base_directory()
    return sorted(entry.name for entry in base.iterdir() if (entry / "lock").exists()) if base.is_dir() else []


def remove(name: str, timeout_s: float = 20.0) -> bool:
    """End a cluster, running, half started or dead, and remove all its files; False if there was nothing.

    Raises UsageError for another user's."""
    where = layout(name)
    owner = next((found for state in (where.state, ROOTS / name) if (found := _owner(state)) is not None), None)
    if owner not in (None, os.geteuid()) and os.geteuid() != 0:
        raise UsageError(f"dev cluster {name} belongs to user {owner}, who alone can end it (or root)")
    if not where.state.is_dir():
        return False
    try:
        control.ask(where, "stop")
    except SlurmError:
        pass  # no rack: only files are left, or a start is under way, which is waited for below
    with control.claimed(where, timeout_s):
        processes.kill_rootless(where)
        control.sweep(where)
        where.lock.unlink(missing_ok=True)  # another process may have removed it all meanwhile
        with contextlib.suppress(FileNotFoundError):
            where.state.rmdir()
    try:
        where.state.parent.rmdir()
    except OSError:
        pass  # other clusters exist
    return True


def _owner(state: Path) -> int | None:
    try:
        return state.lstat().st_uid
    except FileNotFoundError:
        return None
    except PermissionError:
        raise UsageError(f"{state} cannot be looked at: it is another user's") from None


def write_files(spec: ClusterSpec, where: ClusterPaths, slurm_conf_text: str) -> None:
    """Write all files from which a claimed and swept cluster starts."""
    for machine in spec.machines:
        for directory in (
            where.nvme(machine),
            where.log(machine),
            where.spool(machine),
            where.machine(machine) / "state",
        ):
            directory.mkdir(parents=True)
        where.nvme(machine).chmod(0o1777)
    where.shared.mkdir()
    where.shared.chmod(0o1777)
    home = where.shared / "home" / USER
    home.mkdir(parents=True)
    if not spec.rootless:
        os.chown(home, USER_ID, USER_ID)
    where.etc.mkdir()
    for name, text, mode in (
        ("slurm.conf", slurm_conf_text, 0o644),
        ("gres.conf", slurm_conf.render_gres_conf(spec), 0o644),
        ("cgroup.conf", slurm_conf.render_cgroup_conf(spec), 0o644),
        ("job_container.conf", slurm_conf.render_job_container_conf(spec), 0o644),
        ("slurmdbd.conf", slurm_conf.render_slurmdbd_conf(), 0o600),
        ("hosts", slurm_conf.render_hosts(spec), 0o644),
    ):
        (where.etc / name).write_text(text)
        (where.etc / name).chmod(mode)
    where.munge_key.touch(0o600)
    where.munge_key.write_bytes(os.urandom(1024))
    where.spec.write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
