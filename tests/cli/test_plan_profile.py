"""``resilio plan profile`` and ``profile-comm``: on this machine, in a job, and what is told of mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resilio_hpc.autoparallel import profile_file
from resilio_hpc.cli import main
from resilio_hpc.cli.plan_profile_comm import job_script
from resilio_hpc.slurm.devcluster import DevCluster

ROWS = """layers,hidden,heads,vocab,seq,global_batch,micro_batch,gpu,num_gpus,tp,pp,dp
4,1024,16,512,512,16,1,H100,16,8,1,2
"""


def comm(*words: str) -> int:
    return main.main(["plan", "profile-comm", *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "ucx", "--out", "p.h5"), "--backend ucx: unknown, there are gloo, nccl, mpi"),
        (("--backend", "gloo", "--out", "nowhere/p.h5"), "there is no directory"),
        (("--backend", "gloo", "--here", "1", "--out", "p.h5"), "at least two processes"),
        (("--backend", "gloo", "--nodes", "1", "--out", "p.h5"), "one rank has nobody to talk to"),
        (("--backend", "gloo", "--set", "colour=red", "--out", "p.h5"), "--set colour=red"),
        (("--backend", "gloo", "--here", "2", "--out", "text.h5"), "is no profile, or a damaged one"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.h5").write_text("mine")
    assert comm(*words) == 2
    text = capsys.readouterr().err
    assert said in text and len(text.splitlines()) == 1
    assert Path("text.h5").read_text() == "mine"


def test_a_dry_run_prints_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        comm("--backend=mpi", "--nodes=4", "--mpi=pmix", "--set=partition=p", f"--out={tmp_path}/p.h5", "--dry-run")
        == 0
    )
    text = capsys.readouterr().out
    assert "--nodes=4" in text and "--partition=p" in text and "--mpi=pmix" in text
    assert list(tmp_path.iterdir()) == []


def test_words_reach_the_job_whatever_their_letters() -> None:
    assert "'/a b/$(id).h5'" in job_script(["python", "/a b/$(id).h5"], 2, "")


def test_processes_on_this_machine_are_measured_and_predictions_use_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here.h5"
    assert comm("--backend=gloo", "--here=2", "--seconds=1", f"--out={out}") == 0
    found = profile_file.read(out)
    assert found.about_communication is not None
    assert {found.about_communication[name] for name in ("backend", "device", "ranks")} == {"gloo", "cpu", "2"}
    assert found.curves and all(curve.span == "node" and curve.ranks == 2 for curve in found.curves)
    (tmp_path / "rows.csv").write_text(ROWS)
    assert main.main(["plan", "predict", f"--rows={tmp_path}/rows.csv", f"--profile={out}"]) == 0
    assert "profile: communication as measured between CPUs" in capfd.readouterr().out


def test_a_cpu_is_measured_for_trying_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "try.h5"
    assert main.main(["plan", "profile", "--device=cpu", f"--out={out}"]) == 0
    assert "a CPU is measured, for trying: predictions do not use it" in capfd.readouterr().err
    assert {one.kind for one in profile_file.read(out).samples} == {"matmul", "attention", "normalisation", "optimizer"}
    assert main.main(["plan", "profile", "--device=tpu", f"--out={out}"]) == 2


@pytest.mark.slurm
def test_a_job_measures_over_nodes(cluster: DevCluster) -> None:
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "plan", "profile-comm", "--backend=gloo", "--nodes=2"]
    done = cluster.run(
        "ctl", [*argv, "--ranks-per-node=2", "--seconds=1", "--out=/shared/comm.h5"], 300.0,
        env={"OMP_NUM_THREADS": "1", "PATH": cluster.environment()["PATH"]}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = profile_file.read(cluster.shared / "comm.h5")
    about = found.about_communication
    assert about is not None and about["hosts"] == "n1,n2" and about["nodes"] == "2" and about["slurm_job"]
    assert {curve.span for curve in found.curves} <= {"node", "network"} and found.curves
    assert not list(cluster.shared.glob("comm.h5.*.log"))
    (cluster.shared / "comm.h5").unlink()
