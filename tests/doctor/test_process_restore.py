"""What is said of CRIU, by commands that answer as its versions do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilio_hpc.core import criu
from resilio_hpc.doctor import process_restore
from resilio_hpc.doctor.finding import DoctorFinding, DoctorState, DoctorView

# what Debian's CRIU prints on a kernel that it does not know
FAILS = """echo 'Error (criu/util.c:642): exited, status=1' >&2
echo 'Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds' >&2
echo 'Error (criu/crtools.c:260): Could not initialize kernel features detection.' >&2
exit 1"""


def look(folder: Path, check: str, *more: str, version: str = "echo 'Version: 3.17.1'") -> DoctorFinding:
    for name, text in (("criu", f'case "$1" in --version) {version};; check) {check};; *) exit 99;; esac'),
                       *((name, "exit 0") for name in more)):  # fmt: skip
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return process_restore.process_restore(DoctorView({"PATH": f"{folder}:{os.environ['PATH']}"}, folder))


def test_without_criu_it_says_so(tmp_path: Path) -> None:
    found = process_restore.process_restore(DoctorView({"PATH": str(tmp_path)}, tmp_path))
    assert (found.state, found.seen) == (DoctorState.NOT_HERE, "no criu")


def test_a_check_that_fails_is_told_with_its_first_cause(tmp_path: Path) -> None:
    found = look(tmp_path, FAILS)
    assert found.state is DoctorState.NOTICE
    assert found.seen == "CRIU 3.17.1, and its check fails: vdso: Unexpected rt vDSO area bounds"


def test_a_check_that_passes(tmp_path: Path) -> None:
    found = look(tmp_path, "echo Looks good.")
    assert (found.state, found.seen) == (DoctorState.OK, "CRIU 3.17.1 passes its own check, for --process-images on")


@pytest.mark.parametrize(
    ("version", "more", "word"),
    [("3.17.1", ["cuda-checkpoint"], "without"), ("4.0", [], "without"), ("4.0", ["cuda-checkpoint"], "with")],
)
def test_gpus_take_a_newer_criu_and_nvidias_tool(
    version: str, more: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_restore, "device_files", lambda: 2)
    found = look(tmp_path, "exit 0", *more, version=f"echo 'Version: {version}'")
    assert f"{version} passes its own check, {word} CUDA" in found.seen


def test_a_criu_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu, "LIMIT_S", 0.3)
    assert "its check fails: no answer within 0.3 s" in look(tmp_path, "sleep 60").seen
    assert "CRIU of an unknown version" in look(tmp_path, "exit 0", version="sleep 60").seen
