"""The installed commands at their very beginning and end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S


def python(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source], env=scrubbed("LC_", "LANG", "PYTHON", **variables), input="",
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["", "launch", "ledger"])
def test_help_is_printed_where_the_output_is_not_utf_8(command: str) -> None:
    argv = f"import sys; sys.argv[1:] = {[*command.split(), '--help']!r}; from resilio_hpc.cli.entry import resilio; "
    done = python(argv + "sys.exit(resilio())", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage" in done.stdout


@pytest.mark.parametrize("command", ["resilio", "resilio_launch"])
def test_ctrl_c_while_a_command_is_being_loaded_leaves_no_traceback(command: str) -> None:
    interrupted = "import importlib, os; from resilio_hpc.cli import entry; "
    interrupted += "importlib.import_module = lambda name: os.kill(os.getpid(), 2); "
    done = python(f"{interrupted}entry.{command}()")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_exit_code_is_not_hidden_by_a_prompt() -> None:
    source = "import sys; sys.argv[1:] = ['no-such-command']; from resilio_hpc.cli.entry import resilio; resilio()"
    done = python(source, PYTHONINSPECT="1")
    assert done.returncode == 2
    assert ">>>" not in done.stdout + done.stderr
