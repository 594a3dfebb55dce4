"""The report at 80 and 60 columns, its JSON, exit codes, and the command's own mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.cli import main as resilio
from resilio_hpc.doctor import finding, registry, report
from resilio_hpc.doctor.examine import DoctorResult
from resilio_hpc.doctor.finding import DoctorCheck, DoctorFinding, DoctorState
from tests.support.doctor.machines import Said, doctor

LONG = "a very long sentence about what was seen there, " * 3


def result(name: str, *findings: DoctorFinding, group: str = "memory") -> DoctorResult:
    return DoctorResult(DoctorCheck(name, group, lambda view: finding.ok(""), "", ""), findings, 0.1)


RESULTS = [
    result("shared-memory", finding.ok(LONG)),
    result("huge-pages", finding.notice("none", "It is slower.", "echo advise")),
    result("clock", finding.warning(LONG, LONG, LONG), group="kernel"),
    result("munge", finding.failed("/" + "x" * 300, "No job starts.", "start munged"), group="Slurm"),
    result("job", finding.not_here("not in a job"), group="Slurm"),
]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = report.as_text(RESULTS, report.sentence(RESULTS, True), width)
    assert max(map(len, text.splitlines())) <= width


def test_what_is_fine_takes_a_line_and_what_is_not_says_what_to_do() -> None:
    text = report.as_text(RESULTS, "verdict", 80)
    assert [line[:25].split() for line in text.splitlines() if "shared-memory" in line] == [["ok", "shared-memory"]]
    assert text.count("to do:") == 3
    assert "to do: echo advise" in text
    assert text.splitlines()[0] == "memory"
    assert text.endswith("\n\nverdict")


@pytest.mark.parametrize(
    ("results", "whole", "code", "words"),
    [
        (RESULTS, True, 1, "Launches, or their checkpoints, fail on this machine until this is mended: munge; "
                           "warnings: clock."),
        (RESULTS[:3], True, 0, "Launches work on this machine; warnings: clock."),
        (RESULTS[:2], True, 0, "Launches work on this machine."),
        (RESULTS[:2], False, 0, "Nothing that was looked at keeps launches from working on this machine."),
    ],
)  # fmt: skip
def test_the_verdict_is_one_sentence(results: list[DoctorResult], whole: bool, code: int, words: str) -> None:
    assert (report.exit_code(results), report.sentence(results, whole)) == (code, words)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a look at this machine."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def said(work: Path) -> Said:
    """All that is said of this machine as it is."""
    return doctor("--quick", "--local-checkpoints", str(work), cwd=work)


def test_a_clean_machine_has_no_failure_and_keeps_nothing(said: Said, work: Path) -> None:
    assert said.code == 0
    assert said.found["works"] is True
    assert {one["state"] for one in said.found["checks"]} <= {"ok", "notice", "warning", "not here"}
    assert list(work.iterdir()) == []


@pytest.mark.slow
def test_a_killed_rank_is_recovered_and_nothing_remains(tmp_path: Path, local: Path) -> None:
    said = doctor("loopback-recovery", cwd=tmp_path, RESILIO_LOCAL_DIR=local, PET_NPROC_PER_NODE="7")
    assert said.one("loopback-recovery")["state"] == "ok", said.found
    assert said.one("loopback-recovery")["seen"].endswith(" s, with step 3")
    assert list(local.iterdir()) == []
    assert said.code == 0


@pytest.mark.slow
def test_a_launch_that_takes_too_long_is_ended(tmp_path: Path, local: Path) -> None:
    said = doctor("loopback-recovery", "--limit", "1", cwd=tmp_path, RESILIO_LOCAL_DIR=local)
    assert (said.code, said.one("loopback-recovery")["state"]) == (1, "failed")
    assert said.one("loopback-recovery")["seen"].startswith("the launch has not ended within 1 s")
    assert list(local.iterdir()) == []


KEYS = {"name", "group", "state", "about", "seen", "means", "todo", "seconds"}


def test_the_json_is_one_object_of_a_fixed_shape(said: Said, work: Path) -> None:
    found = said.found
    assert set(found) == {"v", "host", "run_dir", "works", "verdict", "counts", "checks"}
    assert (found["v"], found["run_dir"]) == (1, str(work / "resilio-runs"))
    assert set(found["counts"]) == {state.value for state in DoctorState}
    assert sum(found["counts"].values()) == len(found["checks"])
    assert {one["name"] for one in found["checks"]} == {one.name for one in registry.CHECKS} - {registry.RECOVERY}
    for one in found["checks"]:
        assert set(one) == KEYS
        assert isinstance(one["seconds"], float) and all(isinstance(one[key], str) for key in KEYS - {"seconds"})
        assert bool(one["todo"]) == (one["state"] in ("notice", "warning", "failed"))
    assert json.loads(report.as_json(RESULTS, "verdict", "host", "/run"))["works"] is False


def test_a_working_directory_that_is_gone_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert resilio.main(["doctor", "--quick"]) == 2
    assert "the current directory is gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["shared-memori"], "no check is named 'shared-memori': did you mean shared-memory?"),
        (["nothing-like-it-at-all"], "no check is named 'nothing-like-it-at-all': they are python, extensions"),
        (["--limit", "0"], "--limit 0: give 1 to 3600 seconds"),
        (["--limit", "nan"], "--limit nan: give 1 to 3600 seconds"),
        (["--limit", "soon"], "argument --limit: invalid float value: 'soon' (see: resilio doctor --help)"),
        (["--run-dir", ""], "--run-dir is '', not the path of a directory"),
        (["--run-dir", "s3://bucket/run"], "--run-dir is s3://bucket/run"),
        (["--local-checkpoints", ""], "--local-checkpoints is ''"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert resilio.main(["doctor", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"resilio: error: {error}")
    assert said.count("\n") == 1
