"""``resilio plan profile`` and ``profile-comm``: on this machine, in a job, and what is told of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from resilio_hpc.autoparallel.measure import profile_file
from resilio_hpc.autoparallel.measure.comm_fit import FACTORS, fit
from resilio_hpc.autoparallel.measure.compute_samples import KINDS
from resilio_hpc.cli import main
from resilio_hpc.cli.plan.profile_comm import job_script
from tests.support.requirements import need_program

ROWS = """layers,hidden,heads,vocab,seq,global_batch,micro_batch,gpu,num_gpus,tp,pp,dp
4,1024,16,512,512,16,1,H100,16,8,1,2
"""


def comm(*words: str) -> int:
    return main.main(["plan", "profile-comm", *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "ucx", "--out", "p.h5"), "--backend 'ucx' is not known: known are gloo, nccl, mpi"),
        (("--backend", "gloo", "--out", "nowhere/p.h5"), "there is no directory"),
        (("--backend", "gloo", "--here", "1", "--out", "p.h5"), "at least two processes"),
        (("--backend", "gloo", "--nodes", "1", "--out", "p.h5"), "one rank alone has no peer"),
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
    assert comm("--backend=mpi", "--nodes=4", f"--out={tmp_path}/p.h5", "--dry-run", "--json") == 0
    assert "--nodes=4" in json.loads(capsys.readouterr().out)["sbatch"]
    assert list(tmp_path.iterdir()) == []


def test_words_reach_the_job_whatever_their_letters() -> None:
    assert "'/a b/$(id).h5'" in job_script(["python", "/a b/$(id).h5"], 2, "")


def test_processes_on_this_machine_are_measured_and_predictions_use_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here.h5"
    assert comm("--backend=gloo", "--here=2", "--seconds=0.3", "--largest=4", f"--out={out}", "--json") == 0
    printed = json.loads(capfd.readouterr().out)
    found = profile_file.read(out)
    assert [(one["collective"], one["bandwidth"]) for one in printed["curves"]] == [
        (curve.collective, curve.bandwidth) for curve in found.curves
    ]
    assert found.about_communication is not None
    assert {found.about_communication[name] for name in ("backend", "device", "ranks")} == {"gloo", "cpu", "2"}
    assert found.curves and all(curve.span == "node" and curve.ranks == 2 for curve in found.curves)
    (tmp_path / "rows.csv").write_text(ROWS)
    predict = ["plan", "predict", f"--rows={tmp_path}/rows.csv", "--json"]
    assert main.main(predict) == 0
    (shipped,) = json.loads(capfd.readouterr().out)
    assert main.main([*predict, f"--profile={out}"]) == 0
    (measured,) = json.loads(capfd.readouterr().out)
    assert "profile: communication as measured between CPUs" in measured["pred_note"]
    assert float(measured["pred_iter_time_s"]) > 2 * float(shipped["pred_iter_time_s"])  # no CPU is NVLink


@pytest.mark.slow
def test_collectives_of_mpi_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_program("mpiexec", package="openmpi-bin")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    assert comm("--backend=mpi", "--here=2", "--seconds=0.3", "--largest=1", f"--out={tmp_path}/mpi.h5") == 0
    found = profile_file.read(tmp_path / "mpi.h5")
    assert found.about_communication is not None and found.about_communication["backend"] == "mpi"
    assert found.curves and all(curve.ranks == 2 and curve.bandwidth > 0 for curve in found.curves)


def test_plans_and_explanations_use_a_profile_and_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.h5"
    sizes = [1 << power for power in range(10, 29, 2)]
    curves = [
        fit(name, "network", 16, 8, {size: [80e-6 + FACTORS[name](16) * size / 5e9] for size in sizes})
        for name in ("all-reduce", "all-gather", "reduce-scatter")
    ]
    profile_file.write_communication(path, curves, {"device": "NVIDIA H100 80GB HBM3", "backend": "nccl"})
    words = ["llama2-7b", "--gpus", "16", "--gpu", "h100", "--global-batch", "32", "--tp", "8", "--pp", "1"]
    found = {}
    for name, more in (("shipped", []), ("measured", ["--profile", str(path)])):
        assert main.main(["plan", *words, *more, "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)["choices"][0]
    assert found["measured"]["iteration_s"] > 1.02 * found["shipped"]["iteration_s"]  # a network of 5 GB/s
    explain = ["plan", "explain", found["measured"]["layout"], "--model", "llama2-7b", "--gpu", "h100"]
    assert main.main([*explain, "--global-batch", "32", "--profile", str(path), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["iteration_s"] == pytest.approx(found["measured"]["iteration_s"], rel=1e-5)
    assert main.main(["plan", *words, "--gpu", "a100", "--profile", str(path), "--json"]) == 0
    assert "communication was measured on NVIDIA H100 80GB HBM3, not on A100: not used" in capsys.readouterr().err


def test_a_cpu_is_measured_for_trying_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "try.h5"
    assert main.main(["plan", "profile", "--device=cpu", f"--out={out}"]) == 0
    assert "a CPU is measured, for trying: predictions do not use it" in capfd.readouterr().err
    assert {one.kind for one in profile_file.read(out).samples} == {"matmul", "attention", "normalisation", "optimizer"}
    assert main.main(["plan", "profile", "--device=tpu", f"--out={out}"]) == 2


def test_what_a_profile_would_measure_is_told_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "profile", f"--out={tmp_path}/gpu.h5", "--dry-run"]
    assert main.main(words) == 0
    assert "matmul           m x n x k: 512x4096x4096, " in capsys.readouterr().out
    assert main.main([*words, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["would_measure"]) == set(KINDS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_profile_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "profile", f"--out={tmp_path}/gpu.h5"]) == 2
    assert "this machine has no GPU that torch can use" in capsys.readouterr().err
