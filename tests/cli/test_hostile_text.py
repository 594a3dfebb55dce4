"""Texts and numbers of others: none breaks a command, and no control character of theirs reaches a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilio_hpc.cli import main as commands
from resilio_hpc.core import terminal
from resilio_hpc.events.event_text import KINDS
from resilio_hpc.launch.process.stderr_writer import PatientStream
from resilio_hpc.launch.rundir import run_directory
from tests.support.environments import scrubbed

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mFAKE\u202e\x9b1m\r\nresilio: forged"
NUMBERS = ["NaN", "Infinity", "1e400", "-1e300", "1e308", "9" * 400, "-1", "null", "[]", '"x"']
TEXTS = (
    "job", "node", "rank", "reason", "why", "error", "message", "traceback", "target", "signal", "nodes", "members",
    "absent", "verdict", "device", "check", "evidence", "source", "host", "mode", "argv", "by", "part", "result",
    "pids", "controller", "ranks", "action", "code", "limit", "state", "handover", "jobs",
)  # fmt: skip
FIELDS = (
    "round", "step", "seconds", "size_bytes", "exit_code", "signal", "waited_s", "recovery_s", "lost_steps",
    "world_size", "slots", "link",
)  # fmt: skip


def hostile_run(run: Path) -> None:
    """Every file of a run directory with what its user could have been made to write."""
    evil = json.dumps(EVIL)
    for name in ("ledger", "links", "logs", "checkpoints"):
        (run / name).mkdir(parents=True)
    (run / "run.json").write_text(f'{{"version": 1, "run_id": {evil}, "created": 1e400}}')
    lines = []
    for index, kind in enumerate([*sorted(KINDS), "unknown", EVIL]):
        texts = ", ".join(f"{json.dumps(name)}: {evil}" for name in TEXTS)
        head = f'"v": 1, "writer": {evil}, "event": {json.dumps(kind)}'
        lines.append(f'{{{head}, "time": {time.time()}, {texts}}}')
        number = NUMBERS[index % len(NUMBERS)]
        numbers = ", ".join(f'"{name}": {number}' for name in FIELDS)
        lists = f'"nodes": [{evil}], "members": [{evil}], "held": [{number}], "first_failure": {{"time": {number}}}'
        lines += [f'{{{head}, "time": {at}, {numbers}, {lists}}}' for at in (time.time(), number)]
    (run / "ledger" / "x.jsonl").write_text("\n".join([*lines, "[" * 100_000, "\x00\xff", ""]))
    for index, number in enumerate(NUMBERS):
        turn = f'"number": {index}, "link": {number}, "committed": {number}, "time": {number}'
        (run / "links" / f"turn.{index}.json").write_text(
            f'{{{turn}, "part": {evil}, "job": {evil}, "nodes": [{evil}]}}'
        )
        turn = f'"number": 1{index}, "link": 1, "committed": 3, "time": {1e9 + index}'
        (run / "links" / f"turn.1{index}.json").write_text(f'{{{turn}, "part": "{index}", "job": "{index}"}}')
        verdict = f'{{"v": 1, "time": {number}, "verdict": {evil}, "reason": {evil}, "exit_code": {number}}}'
        (run / "links" / f"{index}.json").write_text(verdict)
        (run / "links" / f"{index}.end").write_text(number)
        handover = f'{{"time": {number}, "part": {evil}, "by": {evil}, "reason": {evil}, "carries_on": true}}'
        (run / "links" / f"{index}.handover.json").write_text(handover)
    (run / "verdict.json").write_text(verdict)
    (run / "chain.json").write_text(
        f'{{"links": [{{"number": 1, "job": "--all"}}, {{"number": 1e400, "job": {evil}}}]}}'
    )
    (run / "links" / "order.json").write_text(f'{{"stopped": true, "by": {evil}, "time": 1e308, "limit": 1e400}}')
    node = f'{{"node": {evil}, "first_rank": 1e400, "local_world_size": {"9" * 30}}}'
    agent = f'{{{evil}: {{"step": 1e400, "step_s": 1e-320, "silent_s": 1e308, "held": [NaN]}}}}'
    status = f'"time": {time.time()}, "phase": {evil}, "controller": {evil}, "round": {1 << 70}, "agents": {agent}'
    (run / "status.json").write_text(f'{{{status}, "members": [{node}], "lost": [{evil}], "committed": 1e400}}')


def is_clean(text: str) -> bool:
    return all(one.isprintable() for line in text.split("\n") for one in line if one != "\t")


@pytest.mark.parametrize(
    "argv",
    [
        "status", "status --json", "view", "report", "report --json", "ledger", "ledger --json", "chain status",
        "chain status --json",
        "chain stop --dry-run", "chain extend --dry-run", "ckpt ls", "resize --dry-run", "nodes learn --dry-run",
        "launch --dry-run --join",
    ],
)  # fmt: skip
def test_a_hostile_run_breaks_no_command_and_writes_no_control_characters(
    argv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    monkeypatch.setenv("RESILIO_NODE_FAULTS", str(tmp_path / "faults"))
    run = tmp_path / "run"
    hostile_run(run)
    assert commands.main([*argv.split(), str(run)]) in (0, 1, 2)
    said = capsys.readouterr()
    assert said.out + said.err
    assert is_clean(said.out) and is_clean(said.err)
    assert not any(line.startswith("resilio: forged") for line in (said.out + said.err).splitlines())


def test_what_a_live_run_reads_of_hostile_numbers_is_nothing(tmp_path: Path) -> None:
    hostile_run(tmp_path / "run")
    verdicts = [run_directory.read_verdict(tmp_path / "run", str(index)) for index in range(len(NUMBERS))]
    assert len(verdicts) == len(NUMBERS)
    assert run_directory.read_pulse(tmp_path / "run", 1) is None


SINFO = """#!/bin/sh
printf 'DRAINED|\\033]0;owned\\007\\033[2J\\033[31mFAKE\\342\\200\\256|\\n'
"""


def test_slurms_words_are_made_printable(tmp_path: Path) -> None:
    """An administrator of a node, or whoever may write its reason, does not write on everybody's terminal."""
    (tmp_path / "sinfo").write_text(SINFO)
    (tmp_path / "sinfo").chmod(0o755)
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "health", "why", "n4"]
    environment = scrubbed(PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    assert "FAKE" in done.stdout
    assert is_clean(done.stdout) and is_clean(done.stderr)


def test_everything_that_is_printed_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    output, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    with terminal.guarded():
        print(EVIL, "\t", "é✓")
        print(EVIL, file=sys.stderr)
        terminal.console(force_terminal=True).print("[bold]drawn[/bold]")
    assert sys.stdout is output
    assert output.getvalue().startswith("?]0;owned??[2J?[31mFAKE??1m \nresilio: forged \t é✓\n")
    assert "\x1b[1mdrawn" in output.getvalue()
    assert is_clean(errors.getvalue())
    stream = PatientStream()
    stream.write(EVIL + "\n")
    assert stream.flush(10.0)
    assert is_clean(errors.getvalue())
