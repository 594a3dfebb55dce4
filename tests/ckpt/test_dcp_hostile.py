"""Damaged and hostile steps under torch.distributed.checkpoint: nothing in them runs, and no flipped bit is loaded."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resilio_hpc.ckpt.dcp.__init__ import ResilioReader, ResilioWriter
from resilio_hpc.ckpt.format.manifest import seal, sha256
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.native import crc32c

STATE = {"x": torch.arange(30_000.0), "small": torch.arange(3), "n": 7, "pair": (1, torch.ones(2))}
TENSOR = [[30_000], [0], 0]


def wanted() -> dict[str, Any]:
    return {"x": torch.zeros(30_000), "small": torch.zeros(3, dtype=torch.int64), "n": 0, "pair": None}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    dcp.save(STATE, storage_writer=ResilioWriter(tmp_path, 3))
    return tmp_path


def shard(directory: Path) -> Path:
    return checkpoint_index.step_directory(directory, 3) / "node-0.h5"


def load(directory: Path, state: dict[str, Any] | None = None) -> dict[str, Any]:
    found = wanted() if state is None else state
    dcp.load(found, storage_reader=ResilioReader(directory, 3))
    return found


def is_right(found: dict[str, Any]) -> bool:
    tensors = all(torch.equal(found[name], STATE[name]) for name in ("x", "small"))  # type: ignore[call-overload]
    return tensors and found["n"] == 7 and found["pair"][0] == 1 and torch.equal(found["pair"][1], torch.ones(2))


def failure(directory: Path, state: dict[str, Any] | None = None) -> str:
    with pytest.raises(dcp.CheckpointException) as raised:
        load(directory, state)
    ((error, _),) = raised.value.failures.values()
    return str(error)


def test_whatever_bit_flips_is_found_or_not_needed(directory: Path) -> None:
    draw, unseen = random.Random(11), 0
    for path in (shard(directory), checkpoint_index.step_directory(directory, 3) / checkpoint_index.MANIFEST):
        size = path.stat().st_size
        fd = os.open(path, os.O_RDWR)
        for at in draw.sample(range(size), min(size, 150)):
            byte = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([byte[0] ^ 1 << draw.randrange(8)]), at)
            try:
                assert is_right(load(directory))
                unseen += path == shard(directory)
            except dcp.CheckpointException as error:
                assert "step" in str(error)
            os.pwrite(fd, byte, at)
        os.close(fd)
    assert is_right(load(directory))
    assert unseen < 75  # HDF5's own metadata, which no load reads


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (b'"tensors"', "the table of rank 0 does not match its checksum"),
        (b'"pair":{"$tuple"', "the tree of rank 0 does not match its checksum"),
        (torch.arange(30_000.0)[100:104].numpy().tobytes(), "step 3: tensor x does not match its checksum at byte 0"),
        (torch.ones(2).numpy().tobytes(), "step 3: tensor pair/1 does not match its checksum at byte 0"),
    ],
)
def test_a_flipped_bit_is_named(region: bytes, message: str, directory: Path) -> None:
    data = bytearray(shard(directory).read_bytes())
    data[data.rindex(region) + 5] ^= 4
    shard(directory).write_bytes(data)
    assert message in failure(directory)


def test_a_file_that_is_gone_or_short_is_told(directory: Path) -> None:
    data = shard(directory).read_bytes()
    shard(directory).write_bytes(data[:-1])
    assert "does not have" in failure(directory)
    shard(directory).unlink()
    assert "node-0.h5 is missing" in failure(directory)
    shard(directory).symlink_to(directory / "elsewhere")
    (directory / "elsewhere").write_bytes(data)
    assert is_right(load(directory))  # a link is followed


def forge(directory: Path, tree: bytes | None = None, tensors: Any = None) -> None:
    """Another tree and table with the right checksums: a hostile step, not a damaged one."""
    manifest = checkpoint_index.step_directory(directory, 3) / checkpoint_index.MANIFEST
    content = json.loads(manifest.read_text())["manifest"]
    record = content["shards"][0]["ranks"][0]
    data = shard(directory).read_bytes()
    at = record["table"]["offset"]
    table = json.loads(data[at : at + record["table"]["size_bytes"]])
    if tree is not None:
        table["tree"] = {"offset": len(data), "size_bytes": len(tree), "crc32c": crc32c(tree)}
        data += tree
    if tensors is not None:
        places = [entry[0] for entry in table["tensors"]]
        entries = dict(zip(places, table["tensors"], strict=True)) | tensors
        table["tensors"] = [entry for place, entry in entries.items()]
    new = json.dumps(table).encode()
    record["table"] = {"offset": len(data), "size_bytes": len(new), "crc32c": crc32c(new)}
    record["table_sha256"] = sha256(new)
    shard(directory).write_bytes(data + new)
    content["shards"][0]["size_bytes"] = len(data) + len(new)
    manifest.write_bytes(seal(json.dumps(content).encode()))


def test_what_is_loaded_from_a_forged_step_is_data(directory: Path) -> None:
    pickle = b"cposix\nsystem\n(S'touch " + str(directory / "ran").encode() + b"'\ntR."
    forge(directory, json.dumps({"n": {"$bytearray": ""}, "pickled": pickle.decode(), "x": 5}).encode())
    found = load(directory, {"n": 0, "pickled": None, "x": torch.zeros(2)})
    assert found == {"n": bytearray(), "pickled": pickle.decode(), "x": 5}
    assert not (directory / "ran").exists()


@pytest.mark.parametrize(
    "tree",
    [
        b"",
        b"{",
        b"\xff",
        b'{"$state":{"n":1},"values":3}',
        b'{"$state":{"n":1},"values":[[1]]}',
        b'{"$state":{"n":1}}',
        b'{"n":{"$tensor":99}}',
        b'{"n":[{"$tensor":99}]}',
        b'{"n":{"$tuple":[{"$tensor":99}]}}',
        b'{"n":{"$tensor":-1}}',
        b'{"n":{"$tensor":true}}',
        b'{"n":{"$global":"os.system"}}',
        b'{"n":{"$torch_dtype":"load"}}',
        b'{"n":{"$numpy_dtype":"|O8"}}',
        b'{"n":{"$dict":[[[],1]]}}',
        b'{"n":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"n":' + b"[" * 320 + b"{}" + b"]" * 320 + b"}",
        b'{"$dict":[["a.b",1],["a",{"b":2}]]}',
    ],
)
def test_a_hostile_tree_is_refused(tree: bytes, directory: Path) -> None:
    forge(directory, tree)
    said = failure(directory)
    assert "rank local" not in said
    assert any(word in said for word in ("plain values", "that is not there", "nested", "two places", "Missing key")), (
        said
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["x", "torch", "int64", [1 << 50], 4096, 1 << 53, [0], [[1 << 50], [0], 0]], "lies beyond the end"),
        (["x", "torch", "int64", [1 << 61, 1 << 61, 0], 4096, 0, []], "impossible shape"),
        (["x", "torch", "load", [1000], 4096, 8000, [0], [[1000], [0], 0]], "has no dtype 'load'"),
        (["x", "torch", "float32", [30_000], 4096, 8, [0], TENSOR], "does not have 8 bytes"),
        (["x", "torch", "float32", [30_000], 4096, 120_000, [0], [[20_000], [0], 0]], "lies outside of the tensor"),
        (["x", "torch", "float32", [2], 4096, 8, [0], [[30_000], [0], 0]], "holds 2 of the 30000 elements of x"),
        (["x", "torch", "float32", [30_000], -1, 120_000, [], TENSOR], "holds 0 of the 30000 elements of x"),
        (["x", "numpy", "<f4", [30_000], -1, 120_000, []], "a tensor that was saved in parts"),
        (["small", "torch", "float32", [30_000], 4096, 120_000, [0], TENSOR], "are of different tensors"),
    ],
)
def test_a_hostile_table_is_refused(entry: Any, message: str, directory: Path) -> None:
    forge(directory, tensors={"x": entry})
    assert message in failure(directory)


def test_parts_that_overlap_are_refused(directory: Path) -> None:
    part = ["x", "torch", "float32", [20_000], 4096, 80_000, [0]]
    forge(directory, tensors={"x": [*part, [[30_000], [0], 0]], "more": [*part, [[30_000], [10_000], 0]]})
    assert "the parts of x that two ranks saved overlap" in failure(directory)


def test_two_tensors_on_the_same_bytes_are_refused(directory: Path) -> None:
    small = ["small", "torch", "int64", [3], 8192, 24, [0], [[3], [0], 0]]
    forge(directory, tensors={"x": ["x", "torch", "float32", [30_000], 4096, 120_000, [0], TENSOR], "small": small})
    assert "share bytes of a file" in failure(directory)
