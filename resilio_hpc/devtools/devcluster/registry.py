"""Running clusters by name, of whatever kind."""

from __future__ import annotations

import msgspec

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.devtools.devcluster.cluster import DevCluster
from resilio_hpc.devtools.devcluster.rootless import RootlessCluster
from resilio_hpc.devtools.devcluster.spec import ClusterSpec, layout


def find(name: str = "dev") -> DevCluster | RootlessCluster:
    """The running cluster called ``name``; raises SlurmError if it is not up."""
    try:
        spec = msgspec.json.decode(layout(name).spec.read_bytes(), type=ClusterSpec)
    except (OSError, msgspec.MsgspecError):
        raise SlurmError(f"dev cluster {name} is not up; start it with: resilio devcluster up --name {name}") from None
    return RootlessCluster.find(name) if spec.rootless else DevCluster.find(name)
