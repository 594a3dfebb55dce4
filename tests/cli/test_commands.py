"""``resilio`` and ``resilio-launch``: dispatch, help, dry run, what reaches the supervisor."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import resilio_hpc
from resilio_hpc.cli import main, resilio_launch
from resilio_hpc.core.errors import LaunchError, UsageError
from resilio_hpc.launch.config.options import LaunchOptions
from tests.support.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def a_folder_and_no_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n")
    for name in ("SLURM_JOB_ID", "RESILIO_LOCAL_NODES", "PYTHON_EXEC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_the_supervisor_gets_the_options_and_gives_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[LaunchOptions] = []

    def run(options: LaunchOptions) -> int:
        seen.append(options)
        return 17

    words = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "train.py", "--lr", "1"]
    assert resilio_launch.main(words, run) == 17
    assert (seen[0].nproc_per_node, seen[0].script_args) == ("2", ("--lr", "1"))
    assert capsys.readouterr().err.startswith("resilio-launch: note: --rdzv-backend has no effect: ")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("wrong"), 2, "resilio-launch: error: wrong\n"),
        (LaunchError("could not"), 1, "resilio-launch: error: could not\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_launch_can_end(
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def run(options: LaunchOptions) -> int:
        raise error

    assert resilio_launch.main(["train.py"], run) == code
    assert capsys.readouterr().err == said


def test_a_dry_run_starts_and_creates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resilio_launch.main(["--dry-run", "--nproc-per-node", "2", "--run-dir", "r", "train.py", "a b"]) == 0
    text = capsys.readouterr().out
    assert "script train.py 'a b'" in text and str(tmp_path / "r") in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"]


def test_a_dry_run_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RESILIO_LOCAL_NODES", "3")
    assert resilio_launch.main(["--dry-run", "--json", "--spares", "1", "--nproc-per-node", "2", "train.py"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["nodes_training"], plan["spares"], plan["world_size"]) == ([2, 2], 1, [4, 4])


def test_help_and_version_of_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (resilio_launch.main, main.main):
        assert command(["--help"]) == 0
        assert "usage:" in capsys.readouterr().out
        assert command(["--version"]) == 0
        assert resilio_hpc.__version__ in capsys.readouterr().out


def test_resilio_lists_its_commands_each_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    text = capsys.readouterr().err
    for command in main.COMMANDS:
        assert re.search(rf"^  {command.name} +\w.{{10,80}}$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("word", "said"),
    [("staus", "did you mean status?"), ("train.py", "resilio launch train.py"), ("xyz", "the commands are launch, ")],
)
def test_an_unknown_command_is_answered_in_one_line(capsys: pytest.CaptureFixture[str], word: str, said: str) -> None:
    assert main.main([word]) == 2
    text = capsys.readouterr().err
    assert said in text and len(text.splitlines()) == 1


def test_resilio_launch_is_reached_through_resilio(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["launch", "--dry-run", "train.py"]) == 0
    assert main.main(["launch", "nowhere.py"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_the_dispatcher_imports_no_command_before_it_is_asked_for() -> None:
    code = (
        "import sys; from resilio_hpc.cli.main import main; main(['--help'])\n"
        "print([m for m in sys.modules if m in ('torch', 'rich', 'msgspec', 'resilio_hpc.cli.resilio_launch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m resilio_hpc.cli.resilio_launch --dry-run train.py | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Traceback" not in done.stderr
