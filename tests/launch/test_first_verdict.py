"""A part of a run has one verdict: what a late controller would say of it does not replace it."""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.launch.rundir import io_worker, run_directory


def test_the_first_verdict_of_a_part_stands(tmp_path: Path) -> None:
    run_directory.open_run(tmp_path)
    for name in ("completed", "terminated"):
        request = {"id": 1, "op": "verdict", "verdict": {"verdict": name, "exit_code": 0, "epoch": 1}}
        assert "error" not in io_worker._serve(request, tmp_path, "8")
    for job in ("8", None):
        verdict = run_directory.read_verdict(tmp_path, job)
        assert verdict is not None
        assert verdict["verdict"] == "completed"
