"""Root directories with another Debian's Slurm (24.11 from trixie, 26.05 from forky), built once and cached."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from resilio_hpc.core.errors import CommandError, UsageError
from resilio_hpc.core.process import run
from resilio_hpc.devtools.devcluster.requirements import ACCOUNTING_PACKAGES, SLURM_PACKAGES
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, SLURM_SERIES

_BUILD_TIMEOUT_S = 1800.0
_APT_TIMEOUT_S = 900.0
_EXTRA_PACKAGES = ("iproute2", "procps")
_PASSED_ON = re.compile(r"(https?|ftp|no)_proxy", re.IGNORECASE)


def cache_directory() -> Path:
    """Return ``$RESILIO_DEVCLUSTER_CACHE``, else resilio/devcluster in the user's cache directory."""
    given = os.environ.get("RESILIO_DEVCLUSTER_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "resilio" / "devcluster"


def root_of(series: str) -> Path:
    """Return the root directory with this Slurm series: the host's own, or the cached one, built or not."""
    if series not in SLURM_SERIES:
        raise UsageError(f"Slurm {series}: choose from {', '.join(SLURM_SERIES)}")
    return Path("/") if series == HOST_SERIES else cache_directory() / series


def is_built(series: str) -> bool:
    """Return whether a cluster of this series can start without building anything."""
    return (root_of(series) / "usr/sbin/slurmctld").exists()


def ensure(series: str) -> Path:
    """Return the root directory with this Slurm series; build it (about a minute) if it is not cached."""
    root = root_of(series)
    if series == HOST_SERIES or is_built(series):
        return root
    missing = [name for name in ("debootstrap", "unshare", "chroot") if shutil.which(name) is None]
    if missing:
        raise UsageError(f"Slurm {series} is built with {missing[0]}: apt-get install debootstrap")
    if os.geteuid() != 0:
        raise UsageError(f"Slurm {series} is not cached in {root} and building it needs root")
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f".{series}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_built(series):
            _build(series, root)
    return root


def _build(series: str, root: Path) -> None:
    for stale in root.parent.glob(f".{series}.building-*"):
        shutil.rmtree(stale)
    building = Path(tempfile.mkdtemp(prefix=f".{series}.building-", dir=root.parent))
    try:
        building.chmod(0o755)
        _debootstrap(SLURM_SERIES[series], building)
        _take_over_apt_settings(building)
        packages = [*SLURM_PACKAGES, *ACCOUNTING_PACKAGES, *_EXTRA_PACKAGES]
        _inside(building, ["update-ca-certificates"])
        # the index of the newest suite expires after a week; an old mirror is good enough for rehearsals
        _inside(building, ["apt-get", "update", "-o", "Acquire::Check-Valid-Until=false"])
        _inside(building, ["apt-get", "install", "-y", "--no-install-recommends", *packages])
        _inside(building, ["apt-get", "clean"])
        for name in ("proc", "sys"):
            (building / name).mkdir(exist_ok=True)
        building.rename(root)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _debootstrap(suite: str, target: Path) -> None:
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", suite, str(target), host_mirror()]
    if not Path("/usr/share/debootstrap/scripts", suite).exists():
        command.append("/usr/share/debootstrap/scripts/sid")  # an older debootstrap does not know the newest suites
    try:
        run(command, _BUILD_TIMEOUT_S)
    except CommandError as error:
        lines = [line for line in error.stdout.splitlines() if line.startswith("E:")] or [str(error)]
        raise UsageError(f"cannot build a root of Debian {suite}: {lines[0]}") from None


def host_mirror() -> str:
    """Return the main Debian archive of this machine's apt. Raises UsageError."""
    fields = "$(REPO_URI) $(COMPONENT)"
    listed = run(["apt-get", "indextargets", "--format", fields, "Created-By: Packages"], 30.0).stdout
    mirror = debian_mirror(listed)
    if not mirror:
        raise UsageError("no Debian mirror in this machine's apt sources: add one to /etc/apt/sources.list.d")
    return mirror


def debian_mirror(index_targets: str) -> str:
    """Return the main Debian archive among lines of ``URI COMPONENT`` (apt-get indextargets).

    Empty if there is none.
    """
    for line in index_targets.splitlines():
        uri, _, component = line.strip().partition(" ")
        if component == "main" and "security" not in uri and uri.rstrip("/").endswith("debian"):
            return uri
    return ""


def _take_over_apt_settings(root: Path) -> None:
    """Copy proxies, certificates and checks of this machine's apt, and keep services from starting."""
    for source in sorted(Path("/etc/apt/apt.conf.d").glob("*")):
        if source.is_file() and re.search(r"^\s*Acquire\b", source.read_text(errors="replace"), re.MULTILINE):
            shutil.copy(source, root / "etc/apt/apt.conf.d" / source.name)
    for source_dir in ("/usr/local/share/ca-certificates", "/etc/apt/auth.conf.d"):
        if Path(source_dir).is_dir():
            shutil.copytree(source_dir, root / source_dir.lstrip("/"), dirs_exist_ok=True)
    for name in ("/etc/hosts", "/etc/resolv.conf"):
        if Path(name).exists():
            shutil.copy(name, root / name.lstrip("/"))
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)


def _inside(root: Path, argv: list[str]) -> None:
    """Run a command in the root, in its own namespaces, so that neither processes nor mounts outlive it."""
    isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={root / 'proc'}"]
    run([*isolate, "chroot", str(root), *argv], _APT_TIMEOUT_S, env=_environment(os.environ))


def _environment(host: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in host.items() if _PASSED_ON.fullmatch(key)}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", **kept}
