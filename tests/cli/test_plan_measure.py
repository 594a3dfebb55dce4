"""``resilio plan measure``, and what ``calibrate`` makes of the runs: chosen, written as jobs, read back."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.autoparallel.measure import profile_file
from resilio_hpc.autoparallel.measure.compute_samples import Sample
from resilio_hpc.cli.main import main
from resilio_hpc.core.ledger import Ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

SEARCH = ("llama3-8b", "--gpus", "8-32", "--gpu", "h100", "--global-batch", "96")
TRAIN = """
import time
from resilio_hpc import train

run = train.attach()
for step in run.steps(0, 60):
    time.sleep(0.1)
"""


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def ran(path: Path, ranks: int, step_s: float, layout: dict[str, str] | None = None) -> None:
    """A run's directory with the ledger of steps that took so long."""
    (path / "ledger").mkdir(parents=True)
    (path / "run.json").write_text("{}")
    (path / "ledger").chmod(0o700)
    path.chmod(0o700)
    at = 1000.0
    ledger = Ledger(path / "ledger", "7-n1", clock=lambda: at)
    ledger.append("launch", job="7", nodes=["n1"], layout=layout or {}, layouts=[])
    ledger.append("round", round=0, members=["n1"], world_size=ranks)
    ledger.append("first_step", round=0, step=1, restored=-1)
    for number in range(1, 8):
        at += 10 * step_s
        ledger.append("pace", round=0, step=1 + 10 * number, steps=10, step_s=step_s, slowest_s=step_s)
    ledger.close()


def test_runs_are_chosen_with_how_long_they_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.csv"
    assert main(["plan", "measure", *SEARCH, "--runs", "4", "--at-most", "16", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and "doubt left" in lines[0] and "GPU-hours in all" in lines[-1]
    left = [float(line.split()[-1].rstrip("%")) for line in lines[1:5]]
    assert left == sorted(left, reverse=True)
    rows = rows_of(out)
    assert len(rows) == 4 and all(int(row["num_gpus"]) <= 16 and row["iter_time_s"] == "" for row in rows)
    assert main(["plan", "predict", "--rows", str(out)]) == 0


def test_measured_lines_of_a_table_count_and_the_others_are_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.csv"
    assert main(["plan", "measure", *SEARCH, "--runs", "6", "--out", str(out)]) == 0
    rows = rows_of(out)
    rows[0]["iter_time_s"] = "9.5"
    with (tmp_path / "some.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    capsys.readouterr()
    assert main(["plan", "measure", "--rows", str(tmp_path / "some.csv"), "--runs", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 3 and len(found["doubt"]) == 4
    assert all(one["row"]["iter_time_s"] == "" for one in found["runs"])


def test_jobs_are_written_and_their_steps_are_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["--runs", "3", "--steps", "30", "--jobs", "trials", "--set", "account=a", "--", "train.py", "--tp={tp}",
             "--steps", "{steps}"]  # fmt: skip
    assert main(["plan", "measure", *SEARCH, *words]) == 0
    said = capsys.readouterr().out
    folder = tmp_path / "trials"
    rows = rows_of(folder / "runs.csv")
    assert f"sbatch {folder}/run-3.sbatch" in said and f"--rows {folder}/runs.csv" in said
    for number, row in enumerate(rows, 1):
        script = (folder / f"run-{number}.sbatch").read_text()
        assert row["run_dir"] == f"{folder}/run-{number}" and row["run_dir"] in script
        assert f"--layout tp={row['tp']},pp={row['pp']}" in script and "--steps 30" in script
        assert f"export RESILIO_MICRO_BATCH={row['micro_batch']}" in script and "--account=a" in script
        assert re.search(r"--time=\d+", script)
    out = folder / "calibration.toml"
    assert main(["plan", "calibrate", "--rows", str(folder / "runs.csv"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("no steady steps on") == 3
    for row in rows:
        ran(Path(row["run_dir"]), int(row["num_gpus"]), 1.25 * float(row["pred_iter_time_s"]))
    assert main(["plan", "calibrate", "--rows", str(folder / "runs.csv"), "--out", str(out)]) == 0
    assert "3 measurements; mean error on them 20.0 %" in out.read_text()
    assert main(["plan", "measure", *SEARCH, *words]) == 2
    assert "holds runs already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*SEARCH, "--jobs", "d"), "--jobs DIR and the training script go together"),
        ((*SEARCH, "--", "train.py"), "--jobs DIR and the training script go together"),
        ((*SEARCH, "--submit"), "--submit and --set go with --jobs"),
        ((*SEARCH, "--json", "--jobs", "d", "--", "train.py"), "without --jobs"),
        ((*SEARCH, "--runs", "0"), "--runs: 1 or more"),
        ((*SEARCH, "--steps", "2"), "--steps: 5 or more"),
        ((*SEARCH, "--at-most", "4"), "the smallest run has 8 GPUs"),
        ((*SEARCH, "--rows", "x.csv"), "--rows holds the candidates"),
        (("--rows", "nowhere.csv"), "nowhere.csv: No such file"),
        ((*SEARCH, "--jobs", "d", "--set", "run_dir=x", "--", "train.py"), "each run gets a directory of its own"),
        ((*SEARCH, "--jobs", "d", "--set", "nodes=2", "--", "train.py"), "nodes is chosen by the planner"),
        ((*SEARCH, "--jobs", "d", "--", "train.py", "{tp}{tq}"), "there is no {tq}"),
        ((*SEARCH[:-1], "0"), "--global-batch"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "measure", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and told in said.err and said.err.count("\n") == 1


def test_where_nothing_fits_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "measure", "gpt3-175b", "--gpus", "8", "--gpu", "a100", "--global-batch", "8"]) == 3
    assert "no layout fits" in capsys.readouterr().err


def test_a_run_is_a_row_with_what_it_recorded_and_what_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = {"tp": "2", "pp": "1", "dp": "4", "micro_batch": "2", "global_batch": "64", "zero": "1",
               "recompute": "selective", "sequence_parallel": "1"}  # fmt: skip
    ran(tmp_path / "a", 8, 3.0, planned)
    out = tmp_path / "rows.csv"
    words = ["plan", "calibrate", "llama3-8b", "--gpu", "h100", "--run", str(tmp_path / "a"), "--rows-out", str(out)]
    assert main(words) == 0
    (row,) = rows_of(out)
    cells = {name: row[name] for name in ("tp", "dp", "micro_batch", "global_batch", "zero", "recompute", "num_gpus")}
    assert cells == {"tp": "2", "dp": "4", "micro_batch": "2", "global_batch": "64", "zero": "1",
                     "recompute": "selective", "num_gpus": "8"}  # fmt: skip
    assert (row["iter_time_s"], row["sequence_parallel"]) == ("3", "1")
    assert main([*words, "--tp", "4", "--recompute", "full", "--zero", "0"]) == 0
    (row,) = rows_of(out)
    assert (row["tp"], row["dp"], row["recompute"], row["zero"]) == ("4", "2", "full", "0")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("llama3-8b",), "--gpu TYPE"),
        (("llama3-8b", "--gpu", "h100"), "--global-batch"),
        (("llama3-8b", "--gpu", "h100", "--global-batch", "64"), "--micro-batch N"),
        (("--gpu", "h100", "--global-batch", "64"), "one of MODEL"),
        (("llama3-8b", "--gpu", "h100", "--global-batch", "64", "--micro-batch", "1", "--tp", "3"), "does not divide"),
        (("llama3-8b", "--gpu", "h100", "--global-batch", "64", "--micro-batch", "1"), "at least 3 are needed"),
    ],
)
def test_what_a_ledger_does_not_say_is_asked_for(
    words: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(tmp_path / "a", 8, 3.0)
    assert main(["plan", "calibrate", "--run", str(tmp_path / "a"), *words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


@pytest.mark.slow
def test_a_real_run_is_a_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    argv = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--nproc-per-node", "2",
            "--no-torch", "--layout", "tp=2", "train.py"]  # fmt: skip
    planned = {"RESILIO_MICRO_BATCH": "2", "RESILIO_GLOBAL_BATCH": "8", "RESILIO_ZERO": "1"}
    done = subprocess.run(
        argv, cwd=tmp_path, env={**scrubbed(), **planned}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    out = tmp_path / "rows.csv"
    words = ["--gpu", "a100", "--run", str(tmp_path / "run"), "--rows-out", str(out)]
    assert main(["plan", "calibrate", "gpt2", *words]) == 0
    (row,) = rows_of(out)
    cells = [row[name] for name in ("num_gpus", "tp", "dp", "micro_batch", "global_batch", "zero")]
    assert cells == ["2", "2", "1", "2", "8", "1"]
    assert 0.1 <= float(row["iter_time_s"]) < 1.0  # each step waits a tenth of a second; the rest is the machine's


def test_a_profile_s_numbers_stay_and_both_together_predict_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, profile, out = tmp_path / "runs.csv", tmp_path / "gpu.h5", tmp_path / "calibration.toml"
    assert main(["plan", "measure", *SEARCH, "--runs", "6", "--out", str(rows)]) == 0
    seconds = 2 * 8192**3 / 700e12
    about = profile_file.about("torch", "2", "H100-SXM-80GB", ["n1"], {})
    profile_file.write_compute(profile, [Sample("matmul", (8192, 8192, 8192), (seconds,))], about)
    table = rows_of(rows)
    for row in table:
        row["iter_time_s"] = str(1.2 * float(row["pred_iter_time_s"]))
    with rows.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    assert main(["plan", "measure", *SEARCH, "--runs", "2", "--profile", str(profile)]) == 0
    both = ["--rows", str(rows), "--profile", str(profile)]
    assert main(["plan", "calibrate", *both, "--out", str(out)]) == 0
    text = out.read_text()
    assert not re.search(r"^(gemm_hopper|link|nic) =", text, re.MULTILINE)
    again = tmp_path / "again.csv"
    assert main(["plan", "predict", *both, "--calibration", str(out), "--out", str(again)]) == 0
    for row in rows_of(again):
        assert float(row["pred_iter_time_s"]) == pytest.approx(float(row["iter_time_s"]), rel=0.04)
