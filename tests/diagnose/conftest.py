"""Fixtures of the tests that need a dev cluster."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from cluster_fixture import cluster

__all__ = ["cluster"]
