"""``resilio ckpt``: what a person and a program see of good, damaged, hostile and absent checkpoints."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from resilio_hpc import ckpt
from resilio_hpc.ckpt.format.manifest import VERSION, seal
from resilio_hpc.cli.common.steps import size_text
from resilio_hpc.cli.main import main
from tests.support.cli.saved_steps import alone, copy_of, save_steps
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def state_of(step: int) -> dict[str, Any]:
        return {"w": torch.full((500, 3), step), "a/b \x1b[31m": torch.ones(2), "n": step}

    return save_steps(tmp_path_factory.mktemp("saved") / "checkpoints", state_of)


@pytest.fixture
def directory(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    alone(monkeypatch)
    return copy_of(saved, tmp_path)


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    try:
        code = main(["ckpt", *map(str, argv)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def as_json(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any]:
    code, out, err = call(capsys, *argv, "--json")
    assert err == ""
    return code, json.loads(out)


def flip(directory: Path, step: int) -> None:
    path = directory / f"step-{step:010d}" / "node-0.h5"
    with h5py.File(path) as file:
        at = file["rank0/w"].id.get_offset()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")


def test_ls_lists_steps_and_says_what_is_damaged(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "ls", directory)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step", "10", "20"]
    os.truncate(directory / "step-0000000010" / "node-0.h5", 100)
    (directory / "step-0000000015").mkdir()
    code, out, _ = call(capsys, "ls", directory)
    assert code == 1
    assert "step 10 is damaged: node-0.h5: missing, or not as large as it was written" in out
    assert "step 15 is damaged: " in out
    code, found = as_json(capsys, "ls", directory)
    assert (code, [row["step"] for row in found["steps"]], sorted(found["damaged"])) == (1, [20], ["10", "15"])


def test_show_tells_which_part_of_a_tensor_a_rank_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = []
    for rank, (rows, start) in enumerate([(4, 0), (2, 4)]):
        for name, number in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(number))
        part = ckpt.Slab(torch.ones(rows, 3), (6, 3), (start, 0))
        copy = ckpt.Slab(torch.ones(4), (4,), (0,), replica=rank)
        saves.append(ckpt.Checkpointer(tmp_path).save(1, {"part": part, "copy": copy}))
    for save in saves:
        save.wait(timeout_s=PATIENCE_S)
    code, out, _ = call(capsys, "show", tmp_path, "--rank", "1")
    assert code == 0
    assert "part  float32  [2, 3] from [4, 0] of [6, 3]  24 B" in out
    assert "copy  float32  [4] from [0] of [4]           16 B *" in out
    assert "the bytes of what is marked * are with another rank" in out
    _, about = as_json(capsys, "show", tmp_path, "--rank", "1")
    assert about["tensors"] == [
        {"path": "part", "dtype": "float32", "shape": [2, 3], "size_bytes": 24, "global_shape": [6, 3],
         "start": [4, 0], "here": True},
        {"path": "copy", "dtype": "float32", "shape": [4], "size_bytes": 16, "global_shape": [4], "start": [0],
         "here": False},
    ]  # fmt: skip


def test_show_tells_tensors_and_plain_values(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "show", directory)
    assert code == 0
    assert out.splitlines()[0] == "step 20, rank 0 of 1, node-0.h5: 2 tensors, 12 kB"
    assert out.splitlines()[1].split() == ["w", "int64", "[500,", "3]", "12", "kB"]
    assert "\x1b" not in out
    assert (
        call(capsys, "show", directory, 10, "--tree")[1]
        == '{"w":{"$tensor":0},"a/b \\u001b[31m":{"$tensor":1},"n":10}\n'
    )
    assert as_json(capsys, "show", directory, 10)[1]["tensors"][0] == {
        "path": "w", "dtype": "int64", "shape": [500, 3], "size_bytes": 12000, "here": True,
    }  # fmt: skip


def test_a_run_directory_is_as_good_as_its_checkpoints(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = directory.parent / "run"
    run.mkdir()
    directory.rename(run / "checkpoints")
    (run / "run.json").write_text("{}")
    assert [row["step"] for row in as_json(capsys, "ls", run)[1]["steps"]] == [10, 20]


def test_verify_reads_everything_and_names_what_is_wrong(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verify", directory)
    assert (code, [line.split(" (")[0] for line in out.splitlines()]) == (0, ["step 10: good", "step 20: good"])
    flip(directory, 20)
    code, out, _ = call(capsys, "verify", directory)
    assert code == 1
    assert "step 10: good" in out
    assert "step 20: damaged" in out
    assert "  node-0.h5: rank 0: tensor w does not match its checksum at byte " in out
    assert call(capsys, "verify", directory, 10)[0] == 0
    code, found = as_json(capsys, "verify", directory)
    assert (code, found["10"]["damages"], [d["tensor"] for d in found["20"]["damages"]]) == (1, [], ["w"])


def test_a_manifest_that_is_garbage_or_too_new_is_damage(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directory / "step-0000000020" / "manifest.json"
    for content, word in (
        (b"garbage", "cannot be read"),
        (seal(b"{}"), "cannot be read"),
        (path.read_bytes().replace(f'"version":{VERSION}'.encode(), b'"version":9'), "upgrade"),
    ):
        path.write_bytes(content)
        code, out, _ = call(capsys, "verify", directory)
        assert code == 1
        assert word in out
        assert call(capsys, "show", directory, 20)[0] == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("show", "{}", "7"), "there is no step 7 in"),
        (("verify", "{}", "7"), "committed: 10, 20"),
        (("show", "{}", "--rank", "1"), "step 20 has ranks 0 to 0, not 1"),
        (("ls", "/nowhere"), "/nowhere is not a directory"),
        (("ls", "{}/step-0000000010"), "step-0000000010 is one step: give the directory that it is in, {}"),
        (("verify", "/proc/self/fd"), "there is no committed step"),
        (("show", "{}", "ten"), "invalid int value"),
        ((), "required: COMMAND"),
    ],
)
def test_a_mistake_is_told_in_a_line(
    directory: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    code, out, err = call(capsys, *(word.replace("{}", str(directory)) for word in argv))
    assert (code, out) == (2, "")
    assert said.replace("{}", str(directory)) in err
    assert "Traceback" not in err


def test_on_a_terminal_there_is_progress(directory: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "resilio_hpc.cli.main", "ckpt", "verify", str(directory)],
        stderr=theirs, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, env=scrubbed(TERM="xterm"),
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "step 10" in shown
    assert "kB" in shown


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_060_000_000, "1.06 GB"), (5 * 10**12, "5 TB")]
)
def test_sizes_are_as_people_read_them(size: int, text: str) -> None:
    assert size_text(size) == text


# -- diff --------------------------------------------------------------------------------------------------------------


def test_diff_tells_tensors_and_values_that_changed(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "diff", directory, 10, 20)
    assert (code, out.splitlines()) == (1, ["rank 0: w: content, in 1 of 1 block(s)", "rank 0: n: 10 → 20"])
    assert call(capsys, "diff", directory, 10, 10)[:2] == (0, "no difference\n")


def test_diff_tells_what_only_one_has_and_other_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = {"list": [1, {"a": None}], "x": torch.zeros(2)}
    ckpt.Checkpointer(tmp_path / "a").save(1, {"w": torch.ones(2, 3), "old": torch.ones(1), "k": 1, **same}).wait()
    ckpt.Checkpointer(tmp_path / "b").save(7, {"w": torch.ones(3, 2), "new": torch.ones(1), "k": True, **same}).wait()
    code, found = as_json(capsys, "diff", tmp_path / "a", 1, 7, "--with", tmp_path / "b")
    assert code == 1
    assert {(one["path"], one["what"]) for one in found} == {
        ("w", "shape [2,3] → [3,2]"),
        ("old", "only in the first"),
        ("new", "only in the second"),
        ("k", "1 → true"),
    }


# -- copy --------------------------------------------------------------------------------------------------------------


def test_copy_makes_committed_steps_that_can_be_restored(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = directory.parent / "new" / "archive"
    code, out, _ = call(capsys, "copy", directory, target, "--dry-run")
    assert (code, re.sub(r"[\d.]+ kB", "S", out)) == (0, "step 20 (S): would be copied\n")
    assert not target.exists()
    code, out, _ = call(capsys, "copy", directory, target, 20, 10)
    assert code == 0
    assert [line.split(" (")[0] for line in out.splitlines()] == ["step 20", "step 10"]
    assert sorted(path.name for path in target.iterdir()) == ["latest", "step-0000000010", "step-0000000020"]
    assert call(capsys, "verify", target)[0] == 0
    step, state = ckpt.Checkpointer(target).restore() or (0, {})
    assert step == 10  # copied last
    assert torch.equal(state["w"], torch.full((500, 3), 10))
    code, _, err = call(capsys, "copy", directory, target)
    assert code == 1
    assert "step 20 is in" in err
    assert "already" in err


def test_a_damaged_step_is_not_copied_and_nothing_remains(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(directory, 20)
    target = directory.parent / "archive"
    code, _, err = call(capsys, "copy", directory, target)
    assert code == 1
    assert "tensor w does not match its checksum" in err
    assert list(target.iterdir()) == []


def test_a_copy_that_the_disk_refuses_leaves_nothing(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    target = directory.parent / "archive"
    monkeypatch.setattr(os, "posix_fallocate", full)
    code, _, err = call(capsys, "copy", directory, target)
    assert code == 1
    assert "step 20: [Errno 28] No space left on device" in err
    assert list(target.iterdir()) == []


def test_a_copy_into_a_run_that_goes_on_is_refused_by_its_fence(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = directory.parent / "archive"
    target.mkdir()
    (target / "epoch-fence").write_text("4\n")
    code, _, err = call(capsys, "copy", directory, target)
    assert code == 1
    assert "epoch 0 may not commit any more: epoch 4 has taken over" in err
    assert [path.name for path in target.iterdir()] == ["epoch-fence"]


# -- prune -------------------------------------------------------------------------------------------------------------


def test_prune_removes_all_but_what_is_to_be_kept(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def pruned(*argv: object) -> tuple[int, str]:
        return call(capsys, "prune", directory, "--keep-checkpoints", *argv)[:2]

    assert pruned(1, "--dry-run") == (0, "would be removed: 10; kept: 20\n")
    assert pruned(5, "--keep-hours", "1e-9", "--dry-run") == (0, "would be removed: 10; kept: 20\n")
    assert pruned(5, "--keep-gb", "1e-9", "--dry-run") == (0, "would be removed: 10; kept: 20\n")
    assert pruned(5, "--keep-gb", 1, "--keep-hours", 1) == (0, "removed: none; kept: 10, 20\n")
    assert as_json(capsys, "prune", directory, "--keep-checkpoints", 1, "--keep-every", 5)[1] == {
        "removed": [], "kept": [10, 20], "dry_run": False,
    }  # fmt: skip
    assert pruned(1) == (0, "removed: 10; kept: 20\n")
    assert pruned(1) == (0, "removed: none; kept: 20\n")
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "step-0000000020"]


def test_prune_keeps_the_last_step_that_verifies_when_newer_ones_are_damaged(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (30, 40):
        ckpt.Checkpointer(directory, keep_last=9).save(step, {"w": torch.full((500, 3), step)}).wait(
            timeout_s=PATIENCE_S
        )
    for step in (20, 30, 40):
        flip(directory, step)
    assert call(capsys, "prune", directory, "--keep-checkpoints", 1, "--dry-run")[1].endswith("kept: 40\n")
    assert call(capsys, "verify", directory, 40)[0] == 1  # now it is known, of 40
    code, out, _ = call(capsys, "ls", directory)
    assert code == 1
    assert "step 40 is damaged: node-0.h5: rank 0: tensor w does not match" in out
    argv = ("prune", directory, "--keep-checkpoints", 1, "--keep-gb", "1e-9")
    assert call(capsys, *argv)[:2] == (0, "removed: 20, 30; kept: 10, 40\n")


def test_verify_takes_back_what_was_noted_of_a_step_that_is_good(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory / "step-0000000020" / "node-0.h5"
    good = path.read_bytes()
    flip(directory, 20)
    assert call(capsys, "verify", directory)[0] == 1
    path.write_bytes(good)
    assert call(capsys, "ls", directory)[0] == 1
    assert call(capsys, "verify", directory)[0] == 0
    assert call(capsys, "ls", directory)[0] == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--keep-checkpoints", "0"], "argument --keep-checkpoints: '0' is not a number from 1 on"),
        (["--keep-checkpoints", "2", "--keep-every", "0"], "argument --keep-every: '0' is not a number from 1 on"),
        (["--keep-checkpoints", "2", "--keep-hours", "7d"], "argument --keep-hours: '7d' is not a number above 0"),
        (["--keep-checkpoints", "2", "--keep-gb", "nan"], "argument --keep-gb: 'nan' is not a number above 0"),
        ([], "--keep-checkpoints"),
    ],
)
def test_prune_refuses_what_it_does_not_understand(
    argv: list[str], message: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "prune", directory, *argv)
    assert code == 2
    assert message in err
    assert ckpt.Checkpointer(directory).steps() == [10, 20]
