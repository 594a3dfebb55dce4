"""A real Slurm cluster on one machine, for rehearsing failures: see docs/devcluster.md."""

from resilio_hpc.devtools.devcluster.cluster import DevCluster
from resilio_hpc.devtools.devcluster.files import names, remove
from resilio_hpc.devtools.devcluster.lifecycle import find, start, start_rootless
from resilio_hpc.devtools.devcluster.processes import NodeProcess
from resilio_hpc.devtools.devcluster.rack_machines import RackMachines

__all__ = ["DevCluster", "NodeProcess", "RackMachines", "find", "names", "remove", "start", "start_rootless"]
