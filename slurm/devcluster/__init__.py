"""A real Slurm cluster on one machine, for rehearsing failures: see docs/devcluster.md."""

from resilio_hpc.slurm.devcluster.cluster import DevCluster, names, remove
from resilio_hpc.slurm.devcluster.control import NodeProcess

__all__ = ["DevCluster", "NodeProcess", "names", "remove"]
