"""Manifests, tables and trees that anybody may have written, with right checksums: restored, or one clear error."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc import ckpt
from resilio_hpc.ckpt.format.manifest import read_manifest, read_table, seal, sha256
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.verify import verify_step
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.native import crc32c

STATE = {"x": np.arange(40), "y": [np.full((2, 3), 7, dtype=np.float16), None, True], "z": {"n": 7, "t": (1, "a")}}
NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 7, 320, 4096, 1 << 31, 1 << 40, 1 << 53, 1 << 61, (1 << 63) - 1, 1 << 64, 1e300]
)
PLAIN = st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8)
WORDS = st.sampled_from(["torch", "numpy", "float16", "int64", "<i8", "|O8", "x", "../x", "own", "replicated", "$", ""])
VALUES = st.recursive(
    PLAIN | WORDS, lambda more: st.lists(more, max_size=4) | st.dictionaries(st.text(max_size=4), more, max_size=3)
)


@cache
def saved() -> tuple[dict[str, bytes], dict[str, Any], dict[str, Any], Any]:
    """The files of a step, and what its manifest, table and tree say."""
    with tempfile.TemporaryDirectory() as name:
        ckpt.Checkpointer(name).save(20, STATE).wait(timeout_s=30)
        step = checkpoint_index.step_directory(Path(name), 20)
        files = {path.name: path.read_bytes() for path in step.iterdir()}
    shard, manifest = files["node-0.h5"], read_manifest(files["manifest.json"], 20)
    at = manifest.shards[0].ranks[0].table
    table = shard[at.offset : at.offset + at.size_bytes]
    tree = read_table(table, len(shard)).tree
    text = shard[tree.offset : tree.offset + tree.size_bytes]
    return files, json.loads(files["manifest.json"])["manifest"], json.loads(table), json.loads(text)


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    yield path
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at one place."""
    if not path:
        return value
    copy = json.loads(json.dumps(content))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


@contextmanager
def step_of(manifest: Any, shard: bytes) -> Iterator[Path]:
    """A directory of checkpoints with this one, whose manifest has the right checksum."""
    with tempfile.TemporaryDirectory() as name:
        step = checkpoint_index.step_directory(Path(name), 20)
        step.mkdir()
        (step / "node-0.h5").write_bytes(shard)
        (step / "manifest.json").write_bytes(seal(json.dumps(manifest).encode()))
        yield Path(name)


def appended(shard: bytes, content: Any) -> tuple[bytes, dict[str, int]]:
    """The file with a description at its end, and where that is."""
    data = json.dumps(content).encode()
    return shard + data, {"offset": len(shard), "size_bytes": len(data), "crc32c": crc32c(data)}


def is_restored_or_refused(manifest: Any, shard: bytes) -> None:
    """Nothing but a CheckpointError, from anything that reads a checkpoint."""
    with step_of(manifest, shard) as directory:
        for state in (None, {"x": np.zeros(40, dtype=np.int64)}, STATE):
            try:
                ckpt.Checkpointer(directory).restore(state, step=20)
            except CheckpointError as error:
                assert str(error)
        try:
            verify_step(directory, checkpoint_index.manifest_of(directory, 20))
        except CheckpointError as error:
            assert str(error)


def with_table(table: Any, shard: bytes) -> tuple[Any, bytes]:
    """Manifest and file with that table."""
    _, manifest, _, _ = saved()
    shard, extent = appended(shard, table)
    content = json.loads(json.dumps(manifest))
    content["shards"][0]["size_bytes"] = len(shard)
    content["shards"][0]["ranks"][0] |= {"table": extent, "table_sha256": sha256(shard[extent["offset"] :])}
    return content, shard


@given(st.data(), VALUES)
def test_any_manifest(data: st.DataObject, value: Any) -> None:
    files, manifest, _, _ = saved()
    path = data.draw(st.sampled_from(list(places(manifest))))
    is_restored_or_refused(changed(manifest, path, value), files["node-0.h5"])


@given(st.data(), VALUES)
def test_any_table(data: st.DataObject, value: Any) -> None:
    files, _, table, _ = saved()
    path = data.draw(st.sampled_from(list(places(table))))
    is_restored_or_refused(*with_table(changed(table, path, value), files["node-0.h5"]))


@given(st.data(), VALUES)
def test_any_tree(data: st.DataObject, value: Any) -> None:
    files, _, table, tree = saved()
    path = data.draw(st.sampled_from(list(places(tree))))
    shard, extent = appended(files["node-0.h5"], changed(tree, path, value))
    is_restored_or_refused(*with_table(table | {"tree": extent}, shard))
