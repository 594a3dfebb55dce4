"""A real Slurm cluster on one machine, for rehearsing failures: see docs/devcluster.md."""

from resilio_hpc.slurm.devcluster.cluster import DevCluster
from resilio_hpc.slurm.devcluster.files import names, remove
from resilio_hpc.slurm.devcluster.processes import NodeProcess
from resilio_hpc.slurm.devcluster.registry import find
from resilio_hpc.slurm.devcluster.rootless import RootlessCluster

__all__ = ["DevCluster", "NodeProcess", "RootlessCluster", "find", "names", "remove"]
