"""A run directory is its user's alone: what another has put there is neither executed nor believed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.cli import main as commands
from resilio_hpc.core.errors import Untrusted
from resilio_hpc.core.ledger import Ledger, LedgerReader, read_ledger
from resilio_hpc.launch.agent.snapshots.saver_link import SaverLink
from resilio_hpc.launch.chain import handover, joining
from resilio_hpc.launch.rundir import (
    chain_order,
    controller_view,
    io_worker,
    notify_targets,
    run_claim,
    run_directory,
    time_limit,
)
from resilio_hpc.launch.rundir.log_spool import Drain
from resilio_hpc.launch.supervisor import live  # fmt: skip
from resilio_hpc.report.overview import RunReader
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.submit import submitit_states
from tests.support.environments import open_the_way_to
from tests.support.security.another_user import NOBODY, as_another_user, needs_root

pytestmark = needs_root

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "the run's name": ("run.json", run_directory.read_run),
    "the run's name, when looked at": ("run.json", RunReader),
    "the secret": ("secret", run_directory.read_run),
    "who leads": ("epoch.3", run_directory.newest_epoch),
    "the pulse": ("status.json", lambda path: run_directory.read_pulse(path, 3)),
    "the status": ("status.json", lambda path: controller_view.ControllerView(path).look()),
    "the status, when looked at": ("status.json", lambda path: RunReader(path).overview(0.0)),
    "the verdict": ("verdict.json", run_directory.read_verdict),
    "the verdict, from Python": ("verdict.json", submitit_states.read_verdict),
    "a part's verdict": ("links/7.json", lambda path: run_directory.read_verdict(path, "7")),
    "a turn": ("links/turn.1.json", run_claim.newest),
    "a handover": ("links/7.handover.json", lambda path: handover.read(path, "7")),
    "an end": ("links/7.end", lambda path: time_limit.read_end_time(path, "7")),
    "an order": ("links/order.json", chain_order.read),
    "the chain": ("chain.json", chain.read_links),
    "arguments of the next job": ("batch-7.json", lambda path: chain.kept_arguments(path, "7")),
    "the script of the next job": ("batch-7.sh", lambda path: chain.kept_arguments(path, "7")),
    "what a joiner runs": ("launch.json", joining.read_record),
    "commands of notifications": ("notify", notify_targets.kept),
    "the ledger": ("ledger/7-n1.jsonl", lambda path: read_ledger(path / "ledger")),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    open_the_way_to(tmp_path)
    return run_directory.open_run(tmp_path / "run").path


def theirs(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.write_text('{"arguments": ["x"]}')
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("what", READERS)
def test_what_another_user_wrote_is_not_believed(what: str, run: Path) -> None:
    name, read = READERS[what]
    (run / "batch-7.sh").write_text("#!/bin/sh\n")
    (run / "batch-7.json").write_text('{"arguments": ["x"]}')
    theirs(run / name)
    with pytest.raises(Untrusted, match=f"{name} belongs to user"):
        read(run)
    (run / name).unlink()
    (run / name).symlink_to("/etc/hostname")
    with pytest.raises(Untrusted, match=f"{name} is a link"):
        read(run)


def test_a_live_run_believes_none_of_it_and_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs(run / "links" / "7.json")
    for _ in range(2):
        reply = io_worker._serve({"id": 1, "op": "look"}, run, "7")
        assert "belongs to user" in reply["error"]
    assert capsys.readouterr().err.count("7.json belongs to user") == 1  # said once


@pytest.mark.parametrize(
    "argv",
    [
        ["status"], ["status", "--json"], ["view"], ["ledger"], ["chain", "status"], ["chain", "stop"],
        ["chain", "extend"], ["resize", "--dry-run"], ["ckpt", "ls"], ["nodes", "learn", "--dry-run"],
        ["launch", "--join"], ["launch", "--standalone", "--dry-run", "train.py", "--run-dir"],
        ["launch", "--standalone", "train.py", "--run-dir"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_refuses_the_run_directory_of_another_user(
    argv: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    os.chown(run, NOBODY, NOBODY)
    words = [*argv[:-3], "--run-dir", str(run), "train.py"] if argv[-1] == "--run-dir" else [*argv, str(run)]
    assert commands.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert f"{run} belongs to user" in said.err


def test_a_directory_that_was_made_with_an_open_umask_is_closed_and_used(tmp_path: Path) -> None:
    """As in a project's directory with the setgid bit: its group could replace what is executed."""
    project = tmp_path / "project"
    project.mkdir()
    open_the_way_to(project)
    os.chown(project, 0, NOBODY)
    project.chmod(0o2775)
    run = run_directory.open_run(project / "run").path
    (run / "checkpoints" / "step-1").mkdir()
    directories = (run, run / "links", run / "ledger", run / "checkpoints" / "step-1")
    for directory in directories:
        directory.chmod(0o2775)
    (run / "notify").write_text("[]")

    def replace() -> str:
        (run / "notify").rename(run / "links" / "notify")
        return "replaced"

    assert as_another_user(replace) == "replaced"  # the older version's
    (run / "links" / "notify").rename(run / "notify")
    assert RunReader(run).path == run
    assert run_directory.open_run(run).path == run
    assert as_another_user(replace) == "PermissionError"
    assert [path.stat().st_mode & 0o7777 for path in directories] == [0o2755] * len(directories)
    os.chown(run / "checkpoints" / "step-1", NOBODY, NOBODY)
    with pytest.raises(Untrusted, match="step-1 belongs to user"):
        run_directory.open_run(run)


def test_what_is_written_goes_where_no_link_leads(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    (run / "logs" / "0").symlink_to(tmp_path)
    (run / "ledger" / "7-n1.jsonl").symlink_to(precious)
    (run / "console.log").symlink_to(precious)
    spool = tmp_path / "spool"
    (spool / "logs" / "0").mkdir(parents=True)
    (spool / "logs" / "0" / "0.log").write_text("line\n")
    assert "is a link" in Drain(spool, run).run()
    with pytest.raises(Untrusted):
        Ledger(run / "ledger", "7-n1")
    with pytest.raises(Untrusted):
        live.with_view(run, lambda: 0)
    assert precious.read_text() == "x"
    assert not (tmp_path / "0.log").exists()
    with pytest.raises(Untrusted):
        LedgerReader(run / "ledger").read_new()


def test_the_batch_script_is_for_its_user_only(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold tokens; Slurm shows it to its user only. ``scontrol`` writes it as the umask says."""

    def written(_job: str, target: Path) -> None:
        target.write_text("#!/bin/sh\nexport TOKEN=secret\n")
        target.chmod(0o664)

    monkeypatch.setattr(chain.commands, "batch_script", written)
    assert "TOKEN" in chain._batch_script("7", run / "batch-7.sh")
    assert (run / "batch-7.sh").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_what_a_saver_writes_into_a_run_directory_is_closed_to_its_group(tmp_path: Path) -> None:
    """A step's folder under umask 002 would let the group exchange shards and manifest."""
    before = os.umask(0o002)
    try:
        link = SaverLink(tmp_path / "saver.log")
        link.start()
    finally:
        os.umask(before)
    assert link._process is not None
    status = Path(f"/proc/{link._process.pid}/status").read_text()
    link.close()
    assert "Umask:\t0022" in status
