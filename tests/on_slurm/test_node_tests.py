"""A test of the nodes of a run on Slurm, ordered by its user: ranks pause, and the same round goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.drills.drill import PRELOAD, SMALL_TESTS
from resilio_hpc.drills.script import counting
from tests.support.waiting import until

RESILIO = str(Path(sys.executable).with_name("resilio"))


def test_a_user_tests_the_nodes_of_a_run(cluster: DevCluster) -> None:
    shared = cluster.shared
    (shared / "tests.toml").write_text(SMALL_TESTS)
    (shared / "elsewhere").mkdir(exist_ok=True)
    job = cluster.submit(
        f"#!/bin/bash\nexport OMP_NUM_THREADS=1 RESILIO_PAIR_POLICY=/shared/tests.toml\n"
        f"exec {RESILIO} launch --no-torch --preload={','.join(PRELOAD)} --run-dir=/shared/tested "
        f"{counting.__file__} --without-torch --steps=100000 --step-seconds=0.02 --every=50 --result=/shared/result\n",
        ["--nodes=3", "--no-kill", "--output=/shared/tested.txt"],
    )  # fmt: skip

    def said() -> str:
        return (shared / "tested.txt").read_text()

    def kinds() -> list[str]:
        return [event.kind for event in read_ledger(shared / "tested" / "ledger")]

    until(lambda: (shared / "tested.txt").exists() and "first_step" in kinds(), "the first step", said)
    order = [RESILIO, "check-nodes", "--run", "/shared/tested"]
    shown = cluster.run("ctl", order, timeout_s=240.0)
    assert "nothing found" in shown.stdout, said()
    assert "ranks go on after" in shown.stdout
    answer = json.loads(cluster.run("ctl", [*order, "--json"], timeout_s=240.0).stdout)
    assert (answer["outcome"], answer["bad"], answer["slow"], answer["nodes"]) == ("fine", [], [], 3)
    committed = kinds().count("committed")
    until(lambda: kinds().count("committed") > committed, "another commit", said)
    assert [kind for kind in kinds() if kind in ("first_step", "stalled", "hang", "recovered")] == ["first_step"]
    assert not (shared / "tested" / "links" / "test.json").exists()
    cluster.run("ctl", ["scancel", str(job)])
    mistake = cluster.run("ctl", [RESILIO, "check-nodes", "--run", "/shared/elsewhere"], check=False)
    assert mistake.returncode == 2
    assert "Traceback" not in mistake.stderr
