"""A real Slurm cluster on one machine, for rehearsing failures: see docs/devcluster.md."""

from resilio_hpc.devtools.devcluster.cluster import DevCluster
from resilio_hpc.devtools.devcluster.files import names, remove
from resilio_hpc.devtools.devcluster.processes import NodeProcess
from resilio_hpc.devtools.devcluster.rootless import RootlessCluster, find

__all__ = ["DevCluster", "NodeProcess", "RootlessCluster", "find", "names", "remove"]
