"""``resilio health`` and ``resilio install-hooks``: what they print, for people and programs, and their exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.cli.health.watch import Naming
from resilio_hpc.cli.main import main
from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.base.check import NodeVerdict, Result
from resilio_hpc.prolog_epilog.base.node import boot_id, uptime_s
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache
from resilio_hpc.slurm.drain.reason import Finding, disowned_reason, write_reason
from tests.support.requirements import need_readable_checkout
from tests.support.waiting import PATIENCE_S

FAST = ["memory-pressure", "cpu-online"]


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """What a command prints; of one that goes well, its output alone: threads of earlier tests may report late."""
    assert main(argv) == code
    captured = capsys.readouterr()
    return captured.out + (captured.err if code else "")


def site(tmp_path: Path, text: str) -> str:
    path = tmp_path / "health.toml"
    path.write_text(text)
    return str(path)


def test_run_says_what_each_check_found_and_what_it_comes_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = ["--directory", str(tmp_path / "run")]
    text = said(capsys, "health", "run", *FAST, *directory)
    assert [line.split()[:2] for line in text.splitlines()[:-1]] == [["ok", name] for name in FAST]
    assert text.splitlines()[-1].endswith("2 of 2 checks passed; nothing is wrong")
    bad = site(tmp_path, '[disk-space]\nlimits.free_percent = 101\n[settings.file-systems]\npaths = ["/"]\ntypes = []')
    whole = json.loads(said(capsys, "health", "run", "disk-space", "--json", "--site", bad, *directory, code=1))
    assert whole["action"] == "drain" and whole["findings"][0]["device"] == "/"
    assert not (tmp_path / "run").exists()  # only --write keeps anything


def test_a_kept_run_is_the_verdict_and_seldom_checks_are_not_repeated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    cache = VerdictCache(tmp_path / "run" / "health")
    names = ["disk-space", "memory-pressure", "clock-sync"]
    now = uptime_s()
    former = Result(check="slurm-conf", status="fail", on_fail="warn", severity="error", note="of then", uptime_s=now)
    cache.write(NodeVerdict(node="n", boot=boot_id(), uptime_s=now, unix_s=0.0, results=(former,)))
    (cache.directory / "wanted").touch()
    assert main(["health", "run", "--write", "--quiet", "--directory", str(cache.directory)]) in (0, 1)
    results = {one.check: one for one in cache.read(uptime_s(), 60.0, boot_id()).results}
    assert set(names) < set(results)
    assert results["slurm-conf"].note == "of then"
    assert not cache.take_request()
    assert (cache.directory / "verdict").read_text().endswith("end\n")


def test_list_and_explain_tell_all_of_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(said(capsys, "health", "list", "--json"))
    assert len(rows) >= 30
    assert len(said(capsys, "health", "list").splitlines()) == len(rows)
    for row in rows:
        text = said(capsys, "health", "explain", row["id"])
        assert row["summary"] in text and row["origin"] in text
        assert json.loads(said(capsys, "health", "explain", row["id"], "--json")) == row


def test_why_says_what_slurm_says_and_whose_reason_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "sinfo"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    full, ours = write_reason([Finding("disk-space", "/ has 1 % free")]), "(resilio undrain n17 ends it)"
    for reason, expected in (
        (full, "  ours: file system full (resilio health explain disk-space)\n"),
        (write_reason([Finding("manual", "loud fan")]), f"  ours: by hand {ours}\n"),
        (
            write_reason([Finding("node-faults", "3")]),
            "  ours: faults that are remembered (resilio nodes list --system",
        ),
        (f"{full} - mine, bob", "  not ours: its author resumes the node\n"),
        (disowned_reason("disk-space: / has 1 % free"), "  ours no more: look at the node, then scontrol update"),
        (
            "Kill task failed",
            "  Slurm's own: when those processes have ended, resilio undrain --kill-task-failed n17\n",
        ),
        ("Not responding", "  Slurm's own: it ends when the node answers again\n"),
        ("Prolog error", "  Slurm's own: when its cause is gone, scontrol update NodeName=n17 State=RESUME\n"),
        ("broken fan", "  not ours"),
    ):
        sinfo.write_text(f"#!/bin/sh\n[ \"$3 $4\" = '-n n17' ] || exit 9\necho 'drained|{reason}|'\n")
        sinfo.chmod(0o755)
        text = said(capsys, "health", "why", "n17")
        assert f"n17: Slurm says DRAINED, reason: {reason}" in text and expected in text
    sinfo.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    whole = json.loads(said(capsys, "health", "why", "n17", "--json"))
    assert (whole["state"], whole["ours"], whole["verdict"]) == ("", False, None)
    assert "cannot be asked" in whole["slurm"]


def test_watch_looks_once_and_keeps_the_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    directory = tmp_path / "run" / "health"
    assert main(["health", "watch", "--once", "--directory", str(directory)]) == 0
    assert VerdictCache(directory).read(uptime_s(), 60.0, boot_id()).results
    assert "is forgotten" in said(capsys, "health", "clear", "gpu-xid", "--directory", str(directory))
    assert VerdictCache(directory).memory(boot_id()).cleared.keys() == {"gpu-xid"}


def test_install_hooks_prints_all_and_writes_what_sh_understands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = tmp_path / "hooks"
    printed = said(capsys, "install-hooks", "--print", "--to", str(where), "--mode", "observe")
    assert not where.exists() and "MODE=observe" in printed and f"Prolog={where}/prolog" in printed
    written = json.loads(said(capsys, "install-hooks", "--json", "--to", str(where), "--missing", "fail"))
    assert f"HealthCheckProgram={where}/health_check" in written["slurm_conf"]
    assert {path.name for path in where.iterdir()} == set(written["files"])
    for name in ("prolog", "epilog", "task_prolog", "health_check"):
        assert os.access(where / name, os.X_OK)
        subprocess.run(["/bin/sh", "-n", str(where / name)], check=True, timeout=PATIENCE_S)
    assert "MISSING=fail" in (where / "prolog").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("health run disk-spice", "no check is named 'disk-spice': did you mean disk-space?"),
        ("health run disk-space --write", "--write keeps a verdict on the whole node: name no checks"),
        ("health why 'n1;reboot'", "'n1;reboot' is not the name of a node"),
        ("health epilog", "SLURM_JOB_ID and SLURM_JOB_UID are not set"),
        ("health list --site /no/such", "cannot read /no/such"),
        ("install-hooks --print --to relative", "--to relative: give an absolute path"),
        ("install-hooks --print --to '/with space'", "give an absolute path without spaces"),
        ("install-hooks --print --ttl 1", "--ttl 1, --interval 60: give 30 to 86400"),
    ],
)
def test_a_mistake_is_one_line(
    argv: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_UID"):
        monkeypatch.delenv(name, raising=False)
    text = said(capsys, *shlex.split(argv), code=2)
    assert message in text and len(text.splitlines()) == 1


def test_any_user_may_look_before_a_start(tmp_path: Path) -> None:
    need_readable_checkout()
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "health", "run", "--context", "start", "--json"]
    become = ["setpriv", "--reuid=20001", "--regid=20001", "--clear-groups"]
    done = subprocess.run([*become, *argv], capture_output=True, text=True, timeout=PATIENCE_S, cwd="/tmp", check=False)
    results = {one["check"]: one for one in json.loads(done.stdout)["results"]}
    assert results["disk-space"]["status"] in ("pass", "fail")
    assert [name for name, one in results.items() if "itself failed" in one["note"]] == []


def test_the_daemon_asks_for_its_nodes_name_until_slurm_tells_it() -> None:
    answers: list[str | SlurmError] = [SlurmError("away"), SlurmError("away"), "gpu001"]
    known: list[str] = []
    told: list[str] = []

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    naming = Naming(known.append, told.append, ask)
    for now_s in (0.0, 59.0, 60.0, 120.0, 180.0):
        naming.turn(now_s)
    assert (known, answers) == (["gpu001"], [])
    assert told == ["what Slurm calls this node is not known, its host name is used: away"]
