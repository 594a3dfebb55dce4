"""Where ranks start: the spawner is there first, so that forking asks nothing of a directory that may hang by then."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.launch.workers.forking import forked_child


def test_the_spawner_goes_where_ranks_start_before_it_is_ready(tmp_path: Path, make_bench: Callable[..., Any]) -> None:
    workplace = tmp_path / "work"
    workplace.mkdir()
    bench = make_bench(use_zygote=False, cwd=str(workplace))
    bench.start()
    assert os.readlink(f"/proc/{bench.spawner.pid}/cwd") == str(workplace)  # noqa: PTH115
    bench.command("script", str(bench.script("import os; print(os.getcwd())")), cwd=str(workplace))
    assert bench.wait_exit().exit_code == 0
    assert bench.out() == f"{workplace}\n"


def test_a_directory_that_is_not_there_is_the_ranks_affair(tmp_path: Path, make_bench: Callable[..., Any]) -> None:
    assert make_bench(use_zygote=False, cwd=str(tmp_path / "missing")).start()


def test_a_process_that_stands_in_the_directory_asks_it_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the file system was asked")

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patches:
        for name in ("access", "chdir", "stat"):
            patches.setattr(os, name, asked)
        assert forked_child.stands_in(str(tmp_path))
        forked_child.check_directory(str(tmp_path))
        with pytest.raises(AssertionError, match="was asked"):
            forked_child.check_directory(str(tmp_path / "elsewhere"))
