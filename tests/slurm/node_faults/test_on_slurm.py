"""With a real Slurm: learning from its reasons, weights, a drain at the threshold, and all of it back again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_fixture import repair, skip_without_slurm, unique_name

from resilio_hpc.demo.stage import binds
from resilio_hpc.slurm.devcluster import DevCluster, image
from resilio_hpc.slurm.drain_reason import Finding, read_reason, write_reason
from resilio_hpc.slurm.node_faults.fault import NodeFault
from resilio_hpc.slurm.node_faults.ledger import FaultLedger

pytestmark = pytest.mark.slurm
DAY = 86_400.0
