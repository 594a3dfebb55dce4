"""What ps shows of a process: its own words within its own arguments, and nothing of its environment is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core import process_title
from tests.support.environments import ROOT, scrubbed

LOOK = """
import os, sys
from resilio_hpc.core import process_title

def read(name):
    with open(f"/proc/self/{name}", "rb") as file:
        return file.read()

environment = read("environ")
"""


def told(code: str, *arguments: str, folder: Path | None = None, **environment: str) -> list[str]:
    """The lines that this code prints in a process of its own, which then still has its environment."""
    end = "\nassert read('environ') == environment and dict(os.environ)\n"
    path = str(ROOT) if folder is None else f"{ROOT}:{folder}"
    done = subprocess.run(
        [sys.executable, "-c", LOOK + code + end, *arguments], capture_output=True, text=True, check=False,
        env={**scrubbed(), "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SAY = "\nprint(read('cmdline').replace(b'\\0', b' ').decode().strip()); print(read('comm').decode().strip())\n"


@pytest.mark.parametrize(
    ("call", "line", "name"),
    [
        ("show('saver', '0dbb:n1')", "resilio saver n1 run 0dbb", "resilio-saver"),
        ("show('disk_server')", "resilio disk_server n2 run 87b0", "resilio-disk"),
        ("show('agent', '0dbb:n1', '(controller, epoch 3)')",
         "resilio agent n1 run 0dbb (controller, epoch 3)", "resilio-agent"),
        ("show('saver', '')", "resilio saver", "resilio-saver"),
        ("show_rank('script', ['train.py', '--lr', '1'], '0dbb:n1')",
         "resilio rank 12 n1: python -u train.py --lr 1", "python r12"),
        ("show_rank('module', ['pkg.train'], 'random')", "resilio rank 12: python -u -m pkg.train", "python r12"),
    ],
)  # fmt: skip
def test_a_process_says_what_it_is(call: str, line: str, name: str) -> None:
    assert told(f"process_title.{call}{SAY}", RESILIO_PROCESS_OF="87b0:n2", RANK="12") == [line, name]


def test_a_later_title_replaces_a_longer_one() -> None:
    code = (
        f"process_title.show('agent', '0dbb:n1', '(controller, epoch 3)'); process_title.show('agent', '0dbb:n1'){SAY}"
    )
    assert told(code)[0] == "resilio agent n1 run 0dbb"


def test_what_does_not_fit_is_cut_and_a_word_cannot_break_out() -> None:
    shown, _ = told(f"process_title.set_title(['resilio', 'x' * 100_000]){SAY}", "SECRET-LESS")
    assert shown.startswith("resilio xxxx") and len(shown) < 2000 and "SECRET" not in shown
    (shown, _) = told(f"process_title.set_title(['a\\0b', 'c']){SAY}")
    assert shown == "a b c"


def test_a_module_that_sets_titles_still_finds_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "setproctitle.py").write_text(
        "import sys\n"
        "words = open('/proc/self/cmdline', 'rb').read().split(b'\\0')\n"
        "assert words.pop() == b'' and len(words) == len(sys.orig_argv), words\n"  # it walks back over so many of them
        "assert words[0].decode() == sys.orig_argv[0]\n"
    )
    before = "process_title.show('zygote', '0dbb:n1'); process_title.show_rank('script', ['train.py'], '0dbb:n1')"
    (line, _) = told(f"{before}\nimport setproctitle{SAY}", "one", "two", folder=tmp_path, RANK="3")
    assert line == f"{sys.executable} resilio rank 3 n1: python -u train.py"
    (line, _) = told(f"import setproctitle\n{before}{SAY}", "one", "two", folder=tmp_path, RANK="3")
    assert line == f"{sys.executable} resilio rank 3 n1: python -u train.py"


def test_helpers_and_agents_are_told_apart_from_ranks() -> None:
    assert process_title.helper_in(b"resilio\0io_worker\0n1\0run\x000dbb\0") == "io_worker"
    for line in (
        b"",
        b"resilio",
        b"resilio\0rank 3 n1:\0python\0",
        b"python\0-m\0resilio_hpc.ckpt\0",
        b"resilio status\0",
    ):
        assert process_title.helper_in(line) == ""
    assert process_title.is_agent(("resilio", "agent", "n1"))
    assert process_title.is_agent((sys.executable, "-P", "-m", process_title.AGENT_MODULE, "{}"))
    assert not process_title.is_agent(("srun", "python", "-m", process_title.AGENT_MODULE))
    assert not process_title.is_agent(("resilio", "rank 3 n1:")) and not process_title.is_agent(())
    assert os.path.exists(ROOT / (process_title.AGENT_MODULE.replace(".", "/") + ".py"))  # noqa: PTH110
