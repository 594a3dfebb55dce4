"""`resilio resize`: mistakes in its command line are one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.cli.main import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: RUN_DIR"),
        (["/nowhere"], "resilio resize /nowhere: there is no such run directory"),
        (["/nowhere", "--watch", "0"], "--watch 0: at least 1 s"),
        (["/nowhere", "--min-nodes", "-1"], "--min-nodes: -1 is not possible"),
        (["/nowhere", "--min-nodes", "3", "--max-nodes", "2"], "--min-nodes 3 is more than --max-nodes 2"),
        (["/nowhere", "--micro-batch", "0"], "--micro-batch: 0 is not possible"),
        (["/nowhere", "nodes=3"], "nodes is chosen by resilio resize itself"),
        (["/nowhere", "Run-Dir=x"], "run_dir is chosen by resilio resize itself"),
        (["/nowhere", "--watch", "9", "walltime=1:00:00"], "template joiner has no key 'walltime': did you mean time?"),
        (["/nowhere", "time=soon"], "time: 'soon' is not a time limit"),
        (["/nowhere", "time"], "'time' is not of the form KEY=VALUE"),
        (["/nowhere", "--policy", "/nowhere/p.toml"], "/nowhere/p.toml: No such file or directory"),
    ],
)
def test_a_mistake_is_told_in_a_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resize", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_holds_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resize", str(tmp_path), "--dry-run"]) == 2
    assert "no run was started in this directory" in capsys.readouterr().err


def test_the_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["resize", "--help"])
    assert "exit codes:" in capsys.readouterr().out
