"""NCCL's calls are noted and passed on untouched, however they are loaded. The NCCL is a fake: there is no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from resilio_hpc.diagnose.hangs.call_ring import CallRing
from resilio_hpc.native import intercept
from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S

SOURCES = ROOT / "tests" / "support" / "native"
OTHER_TOOL = """
#include <unistd.h>
__attribute__((constructor)) static void loaded(void) { write(2, "other tool\\n", 11); }
"""


@dataclass(frozen=True)
class Program:
    """A module that calls the fake NCCL, and a program that loads it."""

    folder: Path

    def run(self, mode: str, preload: str, ring: Path) -> tuple[str, str]:
        """Its output and errors."""
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "LD_PRELOAD": preload}
        done = subprocess.run(
            [self.folder / "program", self.folder / "module.so", mode], env={**environment, "RESILIO_CALLS": str(ring)},
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Built."""
    compiler = shutil.which("cc")
    if compiler is None or intercept.library("nccl") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "tool.c").write_text(OTHER_TOOL)
    builds = (
        ("-shared", "-fPIC", "-o", "libnccl.so.2", "-Wl,-soname,libnccl.so.2", SOURCES / "fake_nccl.c"),
        ("-shared", "-fPIC", "-DMODULE", "-o", "module.so", SOURCES / "nccl_program.c", "-l:libnccl.so.2", "-L."),
        ("-o", "program", SOURCES / "nccl_program.c", "-ldl", "-Wl,--unresolved-symbols=ignore-all"),
        ("-shared", "-fPIC", "-o", "tool.so", "tool.c"),
    )
    for build in builds:
        subprocess.run([compiler, "-Wall", *map(str, build)], cwd=folder, check=True, timeout=PATIENCE_S)
    return Program(folder)


@pytest.mark.parametrize("mode", ["local", "global", "deep"])
@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another tool"])
def test_arguments_and_results_pass_untouched(program: Program, tmp_path: Path, mode: str, other: bool) -> None:
    plain, _ = program.run(mode, "", tmp_path / "none")
    tool = f":{program.folder / 'tool.so'}" if other else ""
    watched, errors = program.run(mode, f"{intercept.library('nccl')}{tool}", tmp_path / "ring")
    assert watched == plain
    assert plain.count("\n") == 12
    assert ("other tool" in errors) == other
    assert not (tmp_path / "none").exists()
    assert (tmp_path / "ring").exists() == (mode != "deep")  # such a module finds its own NCCL first


def test_what_is_noted(program: Program, tmp_path: Path) -> None:
    program.run("local", str(intercept.library("nccl")), tmp_path / "ring")
    ring = CallRing(tmp_path / "ring")
    groups, _ = ring.look()
    assert [(group.family, group.rank, group.size, group.entered) for group in groups] == [
        ("nccl", 2, 4, 4), ("nccl", -1, -1, 3),
    ]  # fmt: skip
    assert ring.counts == (9, 2)  # Bcast is one call, though NCCL makes a Broadcast of it; two makings are completed
    again = tmp_path / "again"
    program.run("global", str(intercept.library("nccl")), again)
    assert [group.id for group in CallRing(again).look()[0]] == [group.id for group in groups]  # as on any other rank


def test_the_last_calls_wait_as_far_as_is_known(program: Program, tmp_path: Path) -> None:
    program.run("local", str(intercept.library("nccl")), tmp_path / "ring")
    _, calls = CallRing(tmp_path / "ring").look()
    assert [(call.group, call.op, call.sequence, call.shape, call.peer, call.completed) for call in calls] == [
        (0, "recv", 0, "11", 0, False), (1, "reduce_scatter", 3, "9 float8_e5m2", -1, False),
    ]  # fmt: skip
