"""Fixtures of the tests that need a dev cluster."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from chain_runs import begin, chain_cluster
from cluster_fixture import cluster, repaired_cluster

__all__ = ["begin", "chain_cluster", "cluster", "repaired_cluster"]
