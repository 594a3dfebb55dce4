"""What a test needs of the machine: each function skips the test, with the reason, where that is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.devtools.devcluster import image
from resilio_hpc.devtools.devcluster.requirements import check
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES, SLURM_SERIES, ClusterSpec


def need_slurm(series: str = HOST_SERIES) -> None:
    """Skip without a dev cluster of this Slurm series; RESILIO_TEST_SLURM allows newer ones' roots to be built."""
    try:
        check(ClusterSpec(name="probe"))
    except UsageError as error:
        pytest.skip(str(error))
    words = {"newest": [NEWEST_SERIES], "all": [*SLURM_SERIES]}
    asked = os.environ.get("RESILIO_TEST_SLURM", "").split(",")
    allowed = [one for word in asked for one in words.get(word, [word])]
    if not image.is_built(series) and series not in allowed:
        pytest.skip(f"no cached root with Slurm {series}; RESILIO_TEST_SLURM=all builds it")


def need_shared_mounts() -> None:
    """A /shared that hangs or caches (bindfs and /dev/fuse)."""
    need_slurm()
    try:
        check(ClusterSpec(name="probe", shared_mount="fuse"))
    except UsageError as error:
        pytest.skip(str(error))


def need_chromium() -> str:
    """The program of a Chromium (Debian's package chromium)."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium is installed (Debian's package chromium)")
    return program


def need_extensions() -> None:
    """The C extensions, which RESILIO_NO_NATIVE leaves out; a checkout that lacks them without it fails."""
    if os.environ.get("RESILIO_NO_NATIVE", "") not in ("", "0"):
        pytest.skip("RESILIO_NO_NATIVE is set")


def need_fabric(providers: int = 1) -> None:
    """libfabric with so many providers that need no hardware, and the extension that was built beside its headers."""
    need_extensions()
    from resilio_hpc.ckpt.replication.fabric import SOFTWARE, available_providers

    try:
        found = len(set(SOFTWARE) & set(available_providers()))
        missing = "" if found >= providers else f"libfabric has {found} providers over sockets, not {providers}"
    except (OSError, ImportError) as error:
        missing = str(error)
    if missing:
        pytest.skip(f"{missing} (apt-get install libfabric-dev, then make setup)")


def need_root() -> None:
    """Root."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


def need_readable_checkout() -> None:
    """A checkout and an interpreter that other users than root can read."""
    need_root()
    need_program("setpriv")
    become = ["setpriv", "--reuid=20001", "--regid=20001", "--clear-groups"]
    argv = [*become, sys.executable, "-c", "import resilio_hpc"]
    tried = subprocess.run(argv, capture_output=True, cwd="/tmp", timeout=60)
    if tried.returncode != 0:
        pytest.skip("the checkout is private: other users cannot read it")


def need_program(*names: str, package: str = "") -> None:
    """Programs on PATH (or in the system's directories)."""
    path = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    missing = [name for name in names if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"needs {missing[0]}" + (f" (apt-get install {package})" if package else ""))


def need_mounts() -> None:
    """Mounts in a namespace of the test's own."""
    need_root()
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "probe", "/mnt"], capture_output=True, text=True, timeout=60
    )
    if tried.returncode != 0:
        pytest.skip(f"file systems cannot be mounted here: {tried.stderr.strip()}")
