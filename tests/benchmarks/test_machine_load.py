"""The load that benchmarks put on a machine ends with them."""

import os
from pathlib import Path

from machine_load import BUSY_PER_CORE, loaded
from resilio_hpc.launch.process.process_tree import children


def test_the_load_runs_while_it_is_wanted_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    with loaded(tmp_path) as processes:
        ours = set(children(os.getpid())) - before
        assert len(ours) == processes == BUSY_PER_CORE * (os.cpu_count() or 1) + 2
    assert not ours & set(children(os.getpid()))
    assert list(tmp_path.iterdir()) == []
