"""What Open OnDemand reads: the fields that docs/site.md promises of ``resilio runs --json``, and the widget."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import typing
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.report.summary import RunSummary
from tests.support.environments import ROOT, scrubbed
from tests.support.requirements import need_program
from tests.support.waiting import PATIENCE_S

PAGE = (ROOT / "docs" / "site.md").read_text().partition("## Open OnDemand")[2]
PROMISED = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
KINDS = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
WIDGET = ROOT / "packaging" / "ondemand" / "_resilio_runs.html.erb"


def told(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The JSON of a run that has ended and of one that begins, whose name of a job is hostile."""
    for job, verdict in (("7", "gave_up"), ("<script>&", "")):
        run = path / f"run-{'ended' if verdict else 'begins'}"
        run_directory.open_run(run)
        Ledger(run / "ledger", "supervisor-main").append("launch", job=job, nodes=["n1"])
        if verdict:
            run_directory.write_verdict(run, job, {"verdict": verdict, "exit_code": 1})
    assert main.main(["runs", "--json", str(path)]) == 0
    return capsys.readouterr().out


def test_the_page_promises_the_fields_that_there_are() -> None:
    hints = typing.get_type_hints(RunSummary)
    fields = {"run_dir" if field.name == "path" else field.name for field in dataclasses.fields(RunSummary)}
    assert set(PROMISED) == fields
    for name, text in PROMISED.items():
        kinds = {KINDS[one] for one in typing.get_args(hints.get(name)) or [hints.get(name, str)]}
        assert set(re.findall(r"string|number|boolean|null", text)) == kinds, name


def test_values_are_of_the_promised_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(tmp_path, capsys))
    assert (found["v"], type(found["time"]), len(found["runs"]), found["unread"]) == (1, float, 2, [])
    for run in found["runs"]:
        assert set(run) == set(PROMISED)
        assert all(KINDS[type(value)] in PROMISED[name] for name, value in run.items())


@pytest.mark.slow
def test_ruby_renders_the_widget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_program("ruby", package="ruby")
    (tmp_path / "runs.json").write_text(told(tmp_path, capsys))

    def page(name: str) -> str:
        render = "require 'erb'; puts ERB.new(File.read(ARGV[0])).result"
        done = subprocess.run(
            ["ruby", "-e", render, str(WIDGET)], capture_output=True, text=True, timeout=PATIENCE_S,
            env={**scrubbed(), "RESILIO_RUNS_JSON": str(tmp_path / name)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = page("runs.json")
    assert "<td>gave up</td>" in shown and "<td>starting</td>" in shown
    assert "&lt;script&gt;&amp;" in shown and "<script>" not in shown
    assert "No list of runs is in" in page("none.json")
    (tmp_path / "torn.json").write_text('{"v": 1, "runs"')
    assert "No list of runs is in" in page("torn.json")
