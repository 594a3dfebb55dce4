"""Fixtures of the tests that need a dev cluster."""

from __future__ import annotations

from tests.support.slurm.chain_runs import begin, chain_cluster

__all__ = ["begin", "chain_cluster"]
