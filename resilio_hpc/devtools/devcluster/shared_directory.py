"""How compute nodes see /shared: directly, or through a file system of their own that can hang and that may cache.

``bind`` shows the host's directory. ``fuse`` puts bindfs in between, one daemon per node: a stopped daemon is a file
system that hangs, for that node alone. ``caching`` is the same with the kernel's caches kept for 30 s, as an NFS
client keeps them: names that exist, names that do not, sizes and times of change. The login node sees the directory
directly, whatever the others do.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from resilio_hpc.devtools.devcluster import namespaces
from resilio_hpc.devtools.devcluster.spec import CONTROLLER, ClusterPaths, ClusterSpec

DAEMON = "bindfs"
CACHED_S = 30  # acregmin is 3 s, acregmax 60 s, acdirmin 30 s by default (nfs(5))

_TIMEOUT_S = 20.0
_OPTIONS = {
    "fuse": "attr_timeout=0,entry_timeout=0,negative_timeout=0",
    # auto_cache: the content from an earlier open is kept unless size or time have changed (close-to-open)
    "caching": f"attr_timeout={CACHED_S},entry_timeout={CACHED_S},negative_timeout={CACHED_S},auto_cache",
}


def mount(spec: ClusterSpec, layout: ClusterPaths, machine: str, target: Path) -> None:
    """Show the shared directory at ``target``. Raises OSError with the daemon's complaint."""
    if spec.shared_mount == "bind" or machine == CONTROLLER:
        namespaces.bind(layout.shared, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    options = f"dev,suid,{_OPTIONS[spec.shared_mount]}"
    # several threads: one slow request must not delay the others, as on a real client
    command = [DAEMON, "--multithreaded", "-o", options, str(layout.shared), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise OSError(f"{DAEMON} did not mount /shared: {done.stderr.strip() or done.stdout.strip()}")
