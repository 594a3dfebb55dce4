"""A chain that the version before the rooms began (a sample, as that version left it) goes on under this one.

``chain-before-rooms.tar.xz``: two nodes of one rank each; job 900001 was stopped before its time limit, at step 915 of
1500, and the next one, 900002, had not begun. The script checks what it restores.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from resilio_hpc.devtools.demo.stage import events_of
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.waiting import PATIENCE_S

SAMPLE = Path(__file__).parent / "samples" / "chain-before-rooms.tar.xz"
RUN = "/shared/chain-before-rooms/run"  # as its files have it


@pytest.mark.slow
def test_an_older_versions_chain_is_shown_and_goes_on(cluster: DevCluster) -> None:
    shutil.unpack_archive(SAMPLE, cluster.shared)
    home = cluster.shared / "chain-before-rooms"

    def chain(*words: str) -> str:
        argv = [sys.executable, "-m", "resilio_hpc.cli.main", "chain", *words]
        return cluster.run("ctl", argv, cwd="/shared").stdout

    part, _ = json.loads(chain("status", "--json", RUN))["parts"]
    assert (part["job"], part["committed"]) == ("900001", [-1, 915])
    before = len(events_of(home / "run"))
    said = chain("extend", RUN)
    assert "carries the chain on, as its link 3" in said
    cluster.wait_for_job(int(said.split()[1]), ["COMPLETED", "FAILED"], PATIENCE_S)
    assert json.loads((home / "run" / "verdict.json").read_text())["verdict"] == "completed"
    new = events_of(home / "run")[before:]
    first = next(event for event in new if event.kind == "first_step")
    assert (first.fields["restored"], first.fields["source"]) == (915, "committed")
    assert [event for event in new if event.kind == "committed"][-1].fields["step"] == 1500
