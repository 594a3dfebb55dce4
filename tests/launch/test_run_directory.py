"""The run directory: one identity whoever comes first, a private secret, exclusive epochs, verdicts."""

from __future__ import annotations

import json
import multiprocessing
import stat
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.protocol.vote import EpochRecord
from resilio_hpc.launch.rundir import run_directory as rd
from tests.support.waiting import PATIENCE_S


def test_a_new_directory_is_private_where_it_must_be(tmp_path: Path) -> None:
    run = rd.open_run(tmp_path / "a" / "run")
    assert stat.S_IMODE((run.path / "secret").stat().st_mode) == 0o600
    assert len(run.secret) == 64
    assert rd.open_run(run.path) == rd.read_run(run.path) == run
    assert "secret" not in (run.path / "run.json").read_text()


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    run = rd.open_run(tmp_path / "run")
    (run.path / "secret").chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        rd.open_run(run.path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": "x", "run_id": 1}', "not json"])
def test_a_foreign_directory_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match="not one of ours"):
        rd.open_run(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"version": rd.VERSION + 1, "run_id": "x"}))
    with pytest.raises(UsageError, match="newer"):
        rd.open_run(tmp_path)


def test_a_place_that_cannot_be_used_is_said_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--run-dir"):
        rd.open_run(tmp_path / "file" / "run")


def _open(path: str, barrier: multiprocessing.synchronize.Barrier, results: multiprocessing.Queue[object]) -> None:
    barrier.wait()
    run = rd.open_run(Path(path))
    results.put((run.run_id, run.secret))


def test_eight_nodes_that_open_it_at_once_share_one_identity(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        barrier, results = context.Barrier(8), context.Queue()
        path = str(tmp_path / f"run{attempt}")
        if attempt % 2:  # its user has made it, with a umask of 002
            Path(path).mkdir()
            Path(path).chmod(0o775)
        processes = [context.Process(target=_open, args=(path, barrier, results)) for _ in range(8)]
        for process in processes:
            process.start()
        assert len({results.get(timeout=PATIENCE_S) for _ in processes}) == 1
        for process in processes:
            process.join()


def test_epochs_are_claimed_once_and_the_newest_is_found(tmp_path: Path) -> None:
    assert rd.newest_epoch(tmp_path) is None
    records = [EpochRecord(n, f"n{n}", f"h{n}:1", "7") for n in range(1, 12)]
    assert all(rd.claim_epoch(tmp_path, record) for record in records)
    assert not rd.claim_epoch(tmp_path, EpochRecord(11, "other", "x:1", "7"))
    (tmp_path / "epoch.tmp").touch()
    assert rd.newest_epoch(tmp_path) == records[-1]


def test_a_pulse_belongs_to_its_epoch(tmp_path: Path) -> None:
    assert rd.read_pulse(tmp_path, 3) is None
    (tmp_path / "status.json").write_text(json.dumps({"epoch": 3, "pulse": 17}))
    assert (rd.read_pulse(tmp_path, 3), rd.read_pulse(tmp_path, 4)) == (17, None)
    (tmp_path / "status.json").write_text("torn{")
    assert rd.read_pulse(tmp_path, 3) is None


def test_a_verdict_is_kept_per_job_and_as_the_runs(tmp_path: Path) -> None:
    run = rd.open_run(tmp_path / "run")
    assert rd.read_verdict(run.path) is None
    rd.write_verdict(run.path, "7", {"verdict": "time_limit", "exit_code": 75})
    rd.write_verdict(run.path, "8", {"verdict": "completed", "exit_code": 0})
    verdicts = [rd.read_verdict(run.path, job) for job in ("7", "8", None, "9")]
    assert [verdict and verdict["verdict"] for verdict in verdicts] == ["time_limit", "completed", "completed", None]
    (run.path / "verdict.json").write_text("[1]")
    assert rd.read_verdict(run.path) is None
