"""Which libraries are loaded before a rank's program, and how they stand beside the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.launch.config.hang_options import HangOptions
from resilio_hpc.launch.workers import interception
from resilio_hpc.launch.workers.forking.load_time_variables import differing
from resilio_hpc.launch.workers.rank_env import rank_environment
from resilio_hpc.native import intercept


@pytest.mark.parametrize(
    ("torch", "mpi", "kind", "program", "families"),
    [
        (True, False, "script", "train.py", ("gloo", "nccl", "cuda", "cublas", "hip")),
        (True, False, "module", "trainer", ("gloo", "nccl", "cuda", "cublas", "hip")),
        (True, True, "script", "train.py", ("gloo", "nccl", "cuda", "cublas", "hip", "mpi")),
        (False, False, "script", "train.py", ()),
        (False, True, "command", "./solver", ("mpi",)),
        (True, False, "command", "bash", ()),
        (True, True, "command", "/usr/bin/apptainer", ()),  # its file is missing in a container
    ],
)
def test_a_family_is_watched_where_it_may_be_used(
    torch: bool, mpi: bool, kind: str, program: str, families: tuple[str, ...]
) -> None:
    assert HangOptions().watched(torch, mpi, kind, program) == families
    assert HangOptions(intercept=False).watched(torch, mpi, kind, program) == ()


def test_the_users_own_libraries_stay_and_come_after() -> None:
    ours = [intercept.library(family) for family in ("gloo", "nccl")]
    if None in ours:
        pytest.skip("needs the C extensions")
    found = interception.preload({"LD_PRELOAD": "/opt/tool.so"}, ("gloo", "nccl"))
    assert found == {"LD_PRELOAD": ":".join([*map(str, ours), "/opt/tool.so"])}
    assert interception.preload({}, ()) == {}


@pytest.mark.parametrize(
    ("device", "families"),
    [("", ("gloo",)), ("nvidiactl", ("gloo", "cuda", "cublas")), ("kfd", ("gloo", "hip"))],
)
def test_a_gpus_libraries_are_loaded_where_there_is_one(tmp_path: Path, device: str, families: tuple[str, ...]) -> None:
    (tmp_path / "dev").mkdir()
    if device:
        (tmp_path / "dev" / device).touch()
    found = interception.preload({}, ("gloo", "cuda", "cublas", "hip"), tmp_path)
    if None in map(intercept.library, families):
        pytest.skip("needs the C extensions")
    assert found == {"LD_PRELOAD": ":".join(str(intercept.library(family)) for family in families)}


def test_a_path_that_cannot_stand_in_the_list_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intercept, "library", lambda family: f"/a path/with:colons/{family}.so")
    assert interception.preload({}, ("gloo",)) == {}
    monkeypatch.setattr(intercept, "library", lambda family: None)  # it was not built
    assert interception.preload({}, ("gloo",)) == {}


def test_ranks_are_still_forked_by_a_spawner_with_the_libraries() -> None:
    spawner = rank_environment({"PATH": "/bin"}, 2, "token", ("gloo", "nccl"))
    assert differing(spawner, {"RESILIO_CALLS": "/dev/shm/a/calls-0-0", "RANK": "0"}) == []


def test_rings_of_earlier_rounds_are_removed(tmp_path: Path) -> None:
    for name in ("calls-3-0", "calls-4-0", "calls-4-1", "0.a", "copies"):
        (tmp_path / name).touch()
    interception.remove_older(tmp_path, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"calls-4-0", "calls-4-1", "0.a", "copies"}
    assert interception.ring_file(tmp_path, 4, 1) == tmp_path / "calls-4-1"
