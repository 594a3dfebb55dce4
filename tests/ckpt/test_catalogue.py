"""What is committed is whole; what is damaged, torn or hostile is never followed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from resilio_hpc import ckpt
from resilio_hpc.ckpt.format.manifest import VERSION, read_manifest, read_table, seal
from resilio_hpc.ckpt.restore.committed_source import CommittedSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint
from tests.support.ckpt.local_node import worn_in


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps 10 and 20, committed."""
    for name in ("RANK", "WORLD_SIZE", "RESILIO_AGENT_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    saver = ckpt.Checkpointer(tmp_path / "checkpoints")
    for step in (10, 20):
        saver.save(step, {"x": torch.full((1000,), step), "step": step}).wait(timeout_s=30)
    return tmp_path / "checkpoints"


def restored(directory: Path) -> int:
    """The step that a new process restores, its content verified."""
    found = ckpt.Checkpointer(directory).restore()
    assert found is not None
    step, state = found
    assert torch.equal(state["x"], torch.full((1000,), step))
    assert state["step"] == step
    return step


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def shard(directory: Path, step: int = 20) -> Path:
    return directory / f"step-{step:010d}" / "node-0.h5"


def manifest(directory: Path, step: int = 20) -> Path:
    return directory / f"step-{step:010d}" / "manifest.json"


def content_of(path: Path) -> dict[str, Any]:
    """What a manifest says."""
    content: dict[str, Any] = json.loads(path.read_text())["manifest"]
    return content


def write_content(path: Path, content: dict[str, Any]) -> None:
    """With the right checksum: a hostile manifest, not a damaged one."""
    path.write_bytes(seal(json.dumps(content).encode()))


def tensor_offset(path: Path) -> int:
    import h5py

    with h5py.File(path) as file:
        return int(file["rank0/x"].id.get_offset())


def in_the_data(path: Path) -> None:
    flip(path, tensor_offset(path) + 4000)


def in_the_tree(path: Path) -> None:
    flip(path, path.read_bytes().index(b'"step":20') + 8)


def in_the_table(path: Path) -> None:
    flip(path, path.read_bytes().index(b'"tensors"') + 3)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [in_the_data, in_the_tree, in_the_table, cut_off, Path.unlink])
def test_a_damaged_shard_falls_to_the_older_step(damage: Callable[[Path], None], directory: Path) -> None:
    assert restored(directory) == 20
    damage(shard(directory))
    assert restored(directory) == 10


def test_when_every_step_is_damaged_that_is_an_error_and_not_a_fresh_start(directory: Path) -> None:
    for step in (10, 20):
        in_the_data(shard(directory, step))
    with pytest.raises(CorruptCheckpoint, match="no checkpoint could be restored"):
        ckpt.Checkpointer(directory).restore()


def test_a_step_that_was_asked_for_by_number_is_never_replaced_by_another(directory: Path) -> None:
    in_the_data(shard(directory))
    with pytest.raises(CorruptCheckpoint, match="tensor x does not match"):
        ckpt.Checkpointer(directory).restore(step=20)


def changed(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    change.__name__ = f"{path[-1]}={str(value)[:20]}"
    return change


RANK = ("shards", 0, "ranks", 0)
HOSTILE = [
    changed(("shards", 0, "file"), "../step-0000000010/node-0.h5"),
    changed(("shards", 0, "file"), "/etc/passwd"),
    changed(("shards", 0, "file"), "node-0.h5\0"),
    changed(("shards", 0, "file"), 7),
    changed(("shards", 0, "size_bytes"), 1 << 61),
    changed(("shards", 0, "size_bytes"), -1),
    changed(("shards", 0, "size_bytes"), 1 << 70),
    changed(("shards",), []),
    changed(("shards",), None),
    changed(("world_size",), 0),
    changed(("world_size",), 1 << 50),
    changed(("world_size",), 2),
    changed((*RANK, "rank"), 1),
    changed((*RANK, "table", "offset"), 1 << 60),
    changed((*RANK, "table", "size_bytes"), 1 << 60),
    changed((*RANK, "table", "offset"), "0"),
    changed((*RANK, "table", "crc32c"), 1 << 40),
    changed(("step",), 10),
    changed(("step",), 20.5),
    changed(("layout",), "mine"),
]


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: change.__name__)
def test_a_hostile_manifest_is_corrupt_and_never_followed(
    change: Callable[[dict[str, Any]], None], directory: Path
) -> None:
    path = manifest(directory)
    content = content_of(path)
    change(content)
    write_content(path, content)
    with pytest.raises(CorruptCheckpoint):
        ckpt.Checkpointer(directory).restore(step=20)
    assert restored(directory) == 10


@pytest.mark.parametrize(
    "garbage", [b"", b"{", b"[]", b"null", b"\xff\xff", b"[" * 100_000, b'{"format": 1}', seal(b"{}"), seal(b"7")]
)
def test_garbage_instead_of_a_manifest_is_corrupt(garbage: bytes, directory: Path) -> None:
    manifest(directory).write_bytes(garbage)
    with pytest.raises(CorruptCheckpoint):
        checkpoint_index.manifest_of(directory, 20)
    assert checkpoint_index.committed_steps(directory) == [10]
    assert restored(directory) == 10


def test_a_manifest_in_which_any_bit_flipped_is_not_read(directory: Path) -> None:
    data = manifest(directory).read_bytes()
    assert read_manifest(data, 20).step == 20
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError):
            read_manifest(bytes(damaged), 20)


def test_a_bit_that_flipped_wherever_a_restore_looks_is_found(tmp_path: Path) -> None:
    saver = ckpt.Checkpointer(tmp_path)
    saver.save(20, {"x": torch.arange(40), "y": torch.ones(3, dtype=torch.bfloat16), "n": 7}).wait(timeout_s=30)
    found = checkpoint_index.manifest_of(tmp_path, 20)
    rank = found.shards[0].ranks[0]
    fd = os.open(shard(tmp_path), os.O_RDWR)
    table = read_table(os.pread(fd, rank.table.size_bytes, rank.table.offset), found.shards[0].size_bytes)
    used = [rank.table, table.tree, *table.tensors]
    with ThreadPoolExecutor(1) as pool:

        def read() -> object:
            with CommittedSource(shard(tmp_path).parent, found, 0, 1, "own") as source:
                return restore(source, None, pool)

        read()
        for extent in used:
            for at in range(extent.offset, extent.offset + extent.size_bytes):
                byte = os.pread(fd, 1, at)[0]
                for bit in range(8):
                    os.pwrite(fd, bytes([byte ^ 1 << bit]), at)
                    with pytest.raises(CorruptCheckpoint):
                        read()
                os.pwrite(fd, bytes([byte]), at)
        read()
    os.close(fd)


def test_a_shard_that_is_a_link_is_believed_by_its_checksums_alone(directory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.h5"
    shard(directory).rename(elsewhere)
    shard(directory).symlink_to(elsewhere)
    assert restored(directory) == 20
    shard(directory).unlink()
    shard(directory).symlink_to(shard(directory, 10))
    with pytest.raises(CorruptCheckpoint):
        ckpt.Checkpointer(directory).restore(step=20)
    assert restored(directory) == 10


def test_a_newer_version_of_the_format_says_so(directory: Path) -> None:
    path = manifest(directory)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "version": VERSION + 1, "manifest": "something else"}))
    with pytest.raises(CheckpointError, match="upgrade") as caught:
        checkpoint_index.manifest_of(directory, 20)
    assert not isinstance(caught.value, CorruptCheckpoint)


def test_a_hostile_table_is_refused_before_anything_is_allocated(directory: Path) -> None:
    """Even one whose checksums are right."""
    from resilio_hpc.ckpt.format.manifest import sha256
    from resilio_hpc.native import crc32c

    content = content_of(manifest(directory))
    record = content["shards"][0]["ranks"][0]
    at, size = record["table"]["offset"], record["table"]["size_bytes"]
    data = shard(directory).read_bytes()
    table = json.loads(data[at : at + size])
    for entry in (
        ["x", "torch", "int64", [1 << 50], 4096, 1 << 53, [0]],
        ["x", "torch", "int64", [1 << 61, 1 << 61, 0], 4096, 0, []],
        ["x", "torch", "int64", [1000], 1 << 61, 8000, [0]],
        ["x", "torch", "load", [1000], 4096, 8000, [0]],
        ["x", "torch", "int64", [1000], 4096, 8000, []],
        ["x", "numpy", "|O8", [1000], 4096, 8000, [0]],
        ["x", "torch", "int64", [-1000], 4096, 8000, [0]],
    ):
        table["tensors"] = [entry]
        new = json.dumps(table).encode()
        shard(directory).write_bytes(data + new)
        content["shards"][0]["size_bytes"] = len(data) + len(new)
        record["table"] = {"offset": len(data), "size_bytes": len(new), "crc32c": crc32c(new)}
        record["table_sha256"] = sha256(new)
        write_content(manifest(directory), content)
        with pytest.raises(CorruptCheckpoint):
            ckpt.Checkpointer(directory).restore(step=20)


def test_old_steps_are_pruned_and_nothing_else_remains(directory: Path) -> None:
    saver = ckpt.Checkpointer(directory, keep_last=2)
    for step in (30, 40):
        saver.save(step, {"x": torch.full((1000,), step), "step": step}).wait(timeout_s=30)
    assert saver.steps() == [30, 40]
    there = sorted(path.name for path in directory.iterdir())
    assert there == [*worn_in(directory), "latest", "step-0000000030", "step-0000000040"]
    assert (directory / "latest").read_text() == "40\n"
    assert sorted(path.name for path in shard(directory, 40).parent.iterdir()) == ["manifest.json", "node-0.h5"]
    checkpoint_index.prune(directory, Retention(2), 0.0)  # by hand: no step is expected that would write over it
    assert sorted(path.name for path in directory.iterdir()) == there[-3:]


def test_damaged_steps_do_not_count_when_old_ones_are_pruned(directory: Path) -> None:
    manifest(directory, 20).write_text("garbage")
    checkpoint_index.prune(directory, Retention(1), 0.0)
    assert checkpoint_index.committed_steps(directory) == [10]


def test_a_step_that_a_restore_found_damaged_does_not_stand_in_for_a_good_one(directory: Path) -> None:
    in_the_data(shard(directory))
    assert restored(directory) == 10
    assert "tensor x does not match" in checkpoint_index.noted_damage(directory, 20)
    again = ckpt.Checkpointer(directory, keep_last=2)
    again.save(30, {"x": torch.full((1000,), 30), "step": 30}).wait(timeout_s=30)
    assert again.steps() == [10, 20, 30]  # the last two good ones, and 20 between them
    again.save(40, {"x": torch.full((1000,), 40), "step": 40}).wait(timeout_s=30)
    assert again.steps() == [30, 40]


def test_a_note_of_damage_goes_with_what_it_is_about(directory: Path) -> None:
    """It is still tried, and when the step is saved again, that one has no note."""
    checkpoint_index.note_damage(directory, 20, "for a test")
    checkpoint_index.note_damage(directory, 20, "another rank found it too")
    checkpoint_index.note_damage(directory, 77, "which is not here")
    assert checkpoint_index.noted_damage(directory, 20) == "for a test"
    assert restored(directory) == 20
    ckpt.Checkpointer(directory).save(20, {"x": torch.full((1000,), 20), "step": 20}).wait(timeout_s=30)
    assert checkpoint_index.noted_damage(directory, 20) == ""
    (shard(directory).parent / "damaged").touch()  # whoever noted it was killed before it could say why
    assert checkpoint_index.noted_damage(directory, 20) == "it was found so"
    assert checkpoint_index.expendable(directory, Retention(1), 0.0) == []


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert checkpoint_index.committed_steps(tmp_path / "none") == []
