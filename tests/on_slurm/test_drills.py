"""``resilio drill run`` on a dev cluster that is there, and a campaign that is interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import USER_ID
from resilio_hpc.drills.campaign import PoissonCampaign
from resilio_hpc.drills.campaign_file import CampaignFile
from resilio_hpc.drills.campaign_plan import CampaignPlan
from resilio_hpc.drills.campaign_result import StruckFault
from resilio_hpc.report.chain.why import read_why
from tests.support.environments import ROOT, scrubbed
from tests.support.waiting import PATIENCE_S, until


def drill(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "drill", "run", *words]
    return subprocess.run(argv, capture_output=True, text=True, env=scrubbed(), timeout=4 * PATIENCE_S)


def files(cluster: DevCluster) -> set[Path]:
    return {path for node in cluster.nodes for path in cluster.layout.nvme(node).iterdir()} | set(
        cluster.shared.iterdir()
    )


@pytest.mark.parametrize(
    ("name", "title", "said"),
    [
        ("rank-sigkill", "rank SIGKILL", "was killed by SIGKILL"),
        pytest.param("node-power-cut-no-spare", "node power cut, no spare", "was lost", marks=pytest.mark.slow),
        pytest.param(
            "gpu-goes-bad-its-node-goes-on-with-the-other", "GPU goes bad, its node goes on with the other",
            "was killed by SIGKILL", marks=pytest.mark.slow,
        ),
        pytest.param("local-disk-full", "local disk full", "No fault", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_drill_leaves_its_evidence_and_the_cluster_as_it_was(
    cluster: DevCluster, tmp_path: Path, name: str, title: str, said: str
) -> None:
    before = files(cluster)
    done = drill(
        name, "--cluster", cluster.name, "--yes", "--no-torch", "--json", "--evidence",
        str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    assert record["passed"] and record["state"].startswith("right: ")
    assert (record["recovery_s"] or 0.0) > 0.0 or said == "No fault"
    folder = Path(record["evidence"])
    kept = json.loads((folder / "drill.json").read_text())
    assert kept["name"] == title and len(kept["acts_at"]) == len(kept["drill"]["acts"])
    assert said in read_why(folder / kept["run"], time.time()).text
    assert list((folder / "nvme").glob("*/*/*")), "no stamps were kept"
    assert not [path for path in folder.rglob("*") if path.name in ("checkpoints", "secret")]
    assert files(cluster) == before
    assert set(cluster.node_states().values()) == {"idle"}


def test_a_cluster_that_is_in_use_or_too_small_is_left_alone(cluster: DevCluster) -> None:
    cluster.submit("#!/bin/bash\nsleep 600\n", ["--output=/dev/null"])
    done = drill("rank-sigkill", "--cluster", cluster.name, "--yes", "--no-torch")
    assert (done.returncode, "has jobs" in done.stderr) == (2, True), done.stderr
    done = drill("preempted-cancel", "--cluster", cluster.name, "--yes")
    assert (done.returncode, "lacks" in done.stderr) == (2, True), done.stderr
    done = drill("rank-sigkill", "--cluster", cluster.name)  # without a terminal
    assert (done.returncode, "give --yes" in done.stderr) == (2, True), done.stderr


TRAIN = """
import time
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer
run = train.attach()
state = {"weights": [0.0]}
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
restored = checkpoint.restore(state)
for step in run.steps(restored[0] if restored else 0, 100000, save=checkpoint.saver(state), every=20):
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_job_of_slurm_is_struck_by_its_user_and_by_no_other(cluster: DevCluster) -> None:
    folder = cluster.shared / "struck"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    launch = f"{sys.executable} -m resilio_hpc.cli.resilio_launch --no-torch --nproc-per-node 2 --run-dir run train.py"
    job = cluster.submit(
        f"#!/bin/bash\n#SBATCH --no-kill --exclusive --nodes=2 --output=/shared/struck/out.txt\n"
        f"export PYTHONPATH={ROOT}\ncd /shared/struck\nexec {launch}\n"
    )

    def events(kind: str) -> list[dict[str, Any]]:
        ledger = folder / "run" / "ledger"
        return [event.fields for event in read_ledger(ledger) if event.kind == kind] if ledger.is_dir() else []

    def strike(user: str, run: str, *words: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "resilio_hpc.cli.main", "drill", "run", "rank-sigkill", "--run", run, *words]
        where = "/shared/struck" if user == "root" else "/tmp"
        done = cluster.run(
            "ctl", argv, check=False, user=user, env={"PYTHONPATH": str(ROOT)}, cwd=where, timeout_s=PATIENCE_S
        )
        return done.returncode, done.stdout + done.stderr

    until(lambda: events("committed"), "a first checkpoint", lambda: (folder / "out.txt").read_text())
    code, said = strike("user", "/shared/struck/run", "--yes", "--force")
    assert code != 0 and not events("drill"), said
    code, said = strike("root", str(job), "--yes", "--rank", "3")
    assert code == 0 and "rank-sigkill: passed" in said, said
    (struck,) = events("drill")
    (failed,) = [one for one in events("rank_failed") if one["kind"] == "signal"]
    assert (struck["rank"], struck["node"]) == (3, failed["node"]) == (failed["rank"], struck["node"])

    # the same directory in another user's hands: the job's owner is asked of Slurm as well
    os.chown(folder / "run", USER_ID, USER_ID)
    try:
        code, said = strike("root", "/shared/struck/run", "--yes", "--force")
    finally:
        os.chown(folder / "run", 0, 0)
    assert code != 0 and len(events("drill")) == 1, said


@pytest.mark.slow
def test_an_interrupted_campaign_keeps_what_it_has(cluster: DevCluster, tmp_path: Path) -> None:
    weights = {"rank killed": 3.0, "agent killed": 1.0}
    plan = CampaignPlan(
        mtbf_s=3.0, duration_s=600.0, seed=3, nodes=2, min_nodes=1, ranks=1, torch=False, weights=weights, every=10
    )
    file = CampaignFile(tmp_path / "results.jsonl", plan)
    file.begin()

    def struck(fault: StruckFault) -> None:
        file.struck(fault)
        if len([row for row in file.rows if row["kind"] == "fault"]) == 3:
            time.sleep(8.0)  # the run recovers
            raise KeyboardInterrupt

    result = PoissonCampaign(cluster, plan, on_fault=struck).run()
    file.ended(result)
    assert result.interrupted and result.passed, result.wrong
    assert len(result.faults) == 3 and result.lives >= 2
    assert result.faults[-1].recovery_s is not None
    assert result.compared > 0 and result.twin_goodput is not None
    assert 0.0 < result.goodput < 1.0 and result.ledger_goodput == pytest.approx(result.goodput, abs=0.15)
    again = CampaignFile(tmp_path / "results.jsonl", plan)
    assert again.part == 1 and again.left_s == pytest.approx(600.0 - result.seconds)
