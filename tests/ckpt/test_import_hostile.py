"""Files that were made to harm whoever imports them: nothing in them runs, nothing appears, one line says why."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle  # noqa: TID251 - what the others write, and what hurts them
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as names
from torch.distributed.checkpoint.filesystem import _StorageInfo

from resilio_hpc.ckpt.convert import dcp_metadata
from resilio_hpc.ckpt.convert.dcp_metadata import read_metadata
from resilio_hpc.ckpt.convert.import_step import import_step, open_source
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, UsageError
from tests.support.ckpt.foreign_formats import nothing_but


class Calls:
    """Pickled, it makes whoever loads it call a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


def refused(path: Path, form: Any, error: type[Exception], said: str) -> None:
    target = path.parent / "checkpoints"
    with pytest.raises(error, match=said) as caught:
        import_step(open_source(path, form), target, 1, "replicated")
    assert "\n" not in str(caught.value)
    assert not target.exists() or nothing_but(target)


# -- torch files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_that_runs_a_command_is_not_read(zipped: bool, tmp_path: Path) -> None:
    path, canary = tmp_path / "a.pt", tmp_path / "canary"
    torch.save({"w": torch.ones(2), "x": Calls(os.mkdir, str(canary))}, path, _use_new_zipfile_serialization=zipped)
    if zipped:
        refused(path, "torch", UsageError, "a.pt asks for posix.mkdir, and to read that would run code of the file")
    else:
        refused(path, "torch", CorruptCheckpoint, "one older than torch 1.6 has to be saved again")
    assert not canary.exists()
    if zipped:
        torch.load(path, weights_only=False)  # the file is what it is taken for
        assert canary.exists()


def test_objects_of_the_users_own_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"options": argparse.Namespace()}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "torch", UsageError, r"asks for argparse.Namespace, and .* where you trust it, load it")


def test_files_that_are_no_torch_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(1000)}, path)
    whole = path.read_bytes()
    for content in (b"", b"garbage" * 100, whole[: len(whole) // 2]):
        path.write_bytes(content)
        refused(path, "torch", CorruptCheckpoint, "is no whole torch.save file")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", pickle.dumps({}))
    refused(path, "torch", CorruptCheckpoint, "cannot be read")
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    refused(path, "torch", CorruptCheckpoint, "was packed again, with compression")


def test_a_tensor_larger_than_every_disk_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 50)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "torch", OSError, "no space left for")


# -- safetensors -------------------------------------------------------------------------------------------------------


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


FLOATS = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 9) + b"not json!",
        header(w={**FLOATS, "data_offsets": [0, 8]}),  # no data
        header(w={**FLOATS, "data_offsets": [0, 1 << 40]}) + bytes(8),
        header(a={**FLOATS, "data_offsets": [0, 8]}, b={**FLOATS, "data_offsets": [4, 12]}) + bytes(12),  # overlap
        header(w={"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 8]}) + bytes(8),
        header(w={"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}) + bytes(8),
    ],
)
def test_a_safetensors_header_that_lies(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "a.safetensors").write_bytes(content)
    refused(tmp_path / "a.safetensors", "safetensors", CorruptCheckpoint, "a.safetensors is no whole safetensors file")


@pytest.mark.parametrize(
    "text",
    [
        "garbage",
        '{"tree": {"$tensor": 0}, "names": ["gone"], "arrays": []}',
        '{"tree": {"$tensor": 7}, "names": ["w"], "arrays": []}',
        '{"tree": {"$tensor": 0}, "names": ["w"], "arrays": [5]}',
        '{"tree": {"$nothing": 0}, "names": ["w"], "arrays": []}',
        '{"tree": ' + "[" * 5000 + "]" * 5000 + ', "names": ["w"], "arrays": []}',
    ],
)
def test_plain_values_of_safetensors_that_lie(text: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch").save_file(
        {"w": torch.ones(2)}, tmp_path / "a.safetensors", {"resilio_state": text}
    )
    refused(tmp_path / "a.safetensors", "safetensors", CorruptCheckpoint, "plain values|tree of plain values")


# -- DCP folders -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "dcp"
    dcp.save({"w": torch.rand(4, 3), "n": 5, "opt": {"lr": 0.1}}, checkpoint_id=made, no_dist=True)
    return made


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    found = pickle.loads((folder / ".metadata").read_bytes())
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def test_getattr_in_a_metadata_file_looks_nothing_up(folder: Path) -> None:
    changed(folder, lambda found: setattr(found, "storage_meta", Calls(getattr, OrderedDict, "fromkeys")))
    refused(folder, "dcp", UsageError, ".metadata asks for builtins.getattr, which has no place there")


def test_a_metadata_file_that_runs_a_command_is_not_read(folder: Path) -> None:
    canary = folder.parent / "canary"
    changed(folder, lambda found: setattr(found, "storage_meta", Calls(os.mkdir, str(canary))))
    refused(folder, "dcp", UsageError, ".metadata asks for posix.mkdir, which has no place there; nothing was read")
    assert not canary.exists()
    pickle.loads((folder / ".metadata").read_bytes())  # the file is what it is taken for
    assert canary.exists()


@pytest.mark.parametrize("name", ["builtins eval", "builtins getattr", "torch load", "os system", "torch._utils x",
    "torch.distributed.checkpoint.metadata os", "torch.distributed.checkpoint.metadata dataclass"])  # fmt: skip
def test_no_function_is_found(name: str) -> None:
    module, function = name.split()
    call = f"c{module}\n{function}\n".encode() + b"(V1\ntR."
    with pytest.raises((UsageError, CorruptCheckpoint)):
        read_metadata(call)


def test_no_pickle_changes_what_reads_it() -> None:
    """BUILD sets attributes: of a record's class it must not."""
    before = {name: dict(vars(made)) for (_, name), made in dcp_metadata._KNOWN.items()}
    for module, name in dcp_metadata._KNOWN:
        for state in (b"}Vx\nI1\ns", b"N}Vx\nI1\ns\x86"):  # as attributes, and as slots
            with pytest.raises(CorruptCheckpoint, match="TypeError"):
                read_metadata(f"c{module}\n{name}\n".encode() + state + b"b.")
    assert before == {name: dict(vars(made)) for (_, name), made in dcp_metadata._KNOWN.items()}


def test_a_memo_of_any_size_takes_no_memory() -> None:
    with pytest.raises(CorruptCheckpoint, match="is not that of a DCP folder"):
        read_metadata(b"\x80\x02Nr\xff\xff\xff\xff.")  # LONG_BINPUT at the highest index


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"N.", b"\x80\x04]\x94(" + b"]" * 5000 + b"e.", b"(" * 100_000 + b"t."]
)
def test_a_metadata_file_of_garbage(content: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(content)
    refused(folder, "dcp", CorruptCheckpoint, re.escape(".metadata"))


def stored(found: Any, **fields: Any) -> None:
    for index, info in found.storage_data.items():
        found.storage_data[index] = _StorageInfo(**{**vars(info), **fields})


def tensor(found: Any, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(found.state_dict_metadata["w"], name, value)


HUGE = 1 << 55


def chunk(start: tuple[int, ...], shape: tuple[int, ...]) -> names.ChunkStorageMetadata:
    return names.ChunkStorageMetadata(torch.Size(start), torch.Size(shape))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: stored(found, relative_path="../../../etc/passwd"), "names a file outside of the folder"),
        (lambda found: stored(found, relative_path="/etc/passwd"), "names a file outside of the folder"),
        (lambda found: stored(found, relative_path="gone"), "gone is missing"),
        (lambda found: stored(found, relative_path=7), "is not as torch writes it"),
        (lambda found: stored(found, offset=-1), "is not as torch writes it"),
        (lambda found: stored(found, offset=1 << 40), "ends too early for"),
        (lambda found: stored(found, length=1 << 61), "ends too early for"),
        (lambda found: stored(found, length=10), "larger than its parts|cannot be read"),
        (lambda found: stored(found, offset=0), "holds something else than w|cannot be read"),
        (lambda found: found.storage_data.clear(), "does not say where"),
        (lambda found: setattr(found, "storage_data", None), "is not as torch writes it"),
        (lambda found: setattr(found, "planner_data", {"w": ("w",) * 300}), "is not as torch writes it"),
        (lambda found: setattr(found, "planner_data", {"w": ("n", "w")}), "has a value at n"),
        (lambda found: tensor(found, size=torch.Size((8, 3))), "are not all of it, or overlap"),
        (lambda found: tensor(found, size=torch.Size((HUGE,)), chunks=[chunk((0,), (HUGE,))]), "does not say where"),
        (lambda found: tensor(found, size=torch.Size((HUGE, 1)), chunks=[chunk((0, 0), (HUGE, 1))]), "larger than"),
        (lambda found: tensor(found, chunks=[chunk((0, 0), (5, 3))]), "lies outside of it"),
        (lambda found: tensor(found, chunks=[chunk((0, 0), (2, 3))] * 2), "are not all of it, or overlap"),
        (lambda found: tensor(found, properties=names.TensorProperties(torch.float64)), "larger|something else than w"),
        (lambda found: tensor(found, properties=None), "is not as torch writes it"),
    ],
)  # fmt: skip
def test_a_metadata_file_that_lies(change: Callable[[Any], None], said: str, folder: Path) -> None:
    changed(folder, change)
    refused(folder, "dcp", CorruptCheckpoint, said)


def test_values_and_tensors_of_a_folder_are_read_without_running_code(folder: Path) -> None:
    canary = folder.parent / "canary"
    data = io.BytesIO()
    torch.save(Calls(os.mkdir, str(canary)), data)
    for name in ("n", "w"):
        with open(folder / "__0_0.distcp", "ab") as file:
            at = file.tell()
            file.write(data.getbuffer())

        def point(found: Any, name: str = name, at: int = at) -> None:
            for index, info in found.storage_data.items():
                if index.fqn == name:
                    info.offset, info.length = at, len(data.getbuffer())

        before = (folder / ".metadata").read_bytes()
        changed(folder, point)
        refused(folder, "dcp", UsageError, f"{name} in .* asks for posix.mkdir")
        (folder / ".metadata").write_bytes(before)
    assert not canary.exists()


def test_links_are_not_followed(folder: Path) -> None:
    (folder / "__0_0.distcp").rename(folder.parent / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(folder.parent / "elsewhere")
    refused(folder, "dcp", OSError, "it is a link, not a regular file")


GOOD = pickle.dumps(
    names.Metadata(
        {"w": names.TensorStorageMetadata(names.TensorProperties(torch.float32), torch.Size([2]), [chunk((0,), (2,))]),
         "n": names.BytesStorageMetadata()},
        planner_data={"w": ("w",), "n": ("n",)},
        storage_data={names.MetadataIndex("w", (0,), 0): _StorageInfo("__0_0.distcp", 0, 100),
                      names.MetadataIndex("n"): _StorageInfo("__0_0.distcp", 100, 100)},
    )
)  # fmt: skip


@given(st.data())
def test_a_metadata_file_with_any_bytes_changed_is_read_or_refused(data: st.DataObject) -> None:
    changed = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_metadata(bytes(changed))
    except (UsageError, CheckpointError):
        pass


def test_what_is_not_there_or_of_another_kind(tmp_path: Path, folder: Path) -> None:
    for path, form, said in (
        (tmp_path / "gone.pt", "torch", "gone.pt does not exist"),
        (folder, "torch", "is a directory, and so not of format torch"),
        (folder / ".metadata", "dcp", "is a file, and so not of format dcp"),
        (tmp_path, "dcp", "is no DCP folder: it has no .metadata"),
    ):
        refused(path, form, UsageError, said)
