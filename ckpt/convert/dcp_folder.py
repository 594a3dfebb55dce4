"""Folders of torch.distributed.checkpoint (DCP): ``.metadata``, and files with torch.save's output for each item.

DCP's own reader unpickles any file. This one reads only what ``dcp_metadata`` and torch.load with ``weights_only``
accept. Beside a folder's own files ``resilio.json`` holds what DCP loses: types of keys, tuples, empty containers.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from pathlib import Path
from typing import IO, Any

import msgspec

from resilio_hpc.ckpt.convert.dcp_items import DcpItems
from resilio_hpc.ckpt.convert.dcp_metadata import read_metadata
from resilio_hpc.ckpt.convert.flat_names import state_from, text_of
from resilio_hpc.ckpt.convert.imported import Imported
from resilio_hpc.ckpt.convert.target import DCP_METADATA
from resilio_hpc.ckpt.convert.torch_file import first_line
from resilio_hpc.ckpt.convert.torch_state import tensors_of, torch_state
from resilio_hpc.ckpt.convert.whole_state import WholeState
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.ckpt.state import tensors
from resilio_hpc.core import regular_file
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, UsageError
from resilio_hpc.core.extras import library

_STATE, _DATA = "resilio.json", "__0_0.distcp"
_METADATA_LIMIT = 1 << 30


class _State(msgspec.Struct, forbid_unknown_fields=True):
    """The contents of resilio.json.

    ``metadata_sha256``: of its .metadata; another hash means another save to the folder.
    """

    metadata_sha256: str
    state: msgspec.Raw


def write(whole: WholeState, path: Path, progress: Progress) -> list[str]:
    """Make the folder ``path``, durable; return notes on conversions. Holds one tensor in memory at a time.

    Raises UsageError for what the format cannot hold, CheckpointError, OSError.
    """
    made = torch_state(whole)
    _check_dtypes(whole)
    if not isinstance(made.state, dict):
        raise UsageError(f"a DCP folder holds a dict, and the state is a {type(made.state).__name__}")
    text = text_of(whole)  # before anything is written: two tensors may have the same name
    state, tuples = _lists(made.state)
    numbers = {id(tensor): number for number, tensor in enumerate(made.tensors)}
    _save(state, path, whole, numbers, progress)
    digest = hashlib.sha256((path / DCP_METADATA).read_bytes()).hexdigest()
    write_atomic(path / _STATE, msgspec.json.encode(_State(digest, msgspec.Raw(text))))
    return made.notes + ([f"tuples with tensors made lists: {tuples}"] if tuples else [])


def _check_dtypes(whole: WholeState) -> None:
    """Refuse dtypes whose element size torch does not know: DCP asks torch for it."""
    import torch

    for tensor in whole.tensors:
        dtype = tensors.torch_dtype(tensor.torch_name)
        try:
            if dtype != torch.bool:
                (torch.finfo if dtype.is_floating_point or dtype.is_complex else torch.iinfo)(dtype)
        except TypeError as error:
            raise UsageError(f"{tensor.path} has dtype {tensor.torch_name}, which DCP cannot save") from error


def _lists(node: Any) -> tuple[Any, int]:
    """Return the state with its tuples as lists, and their number.

    DCP stores a tuple as one value, tensors included.
    """
    count = 0

    def change(node: Any) -> Any:
        nonlocal count
        if isinstance(node, dict):
            return {key: change(item) for key, item in node.items()}
        if type(node) is list:
            return [change(item) for item in node]
        if type(node) is tuple and next(tensors_of(node), None) is not None:
            count += 1
            return [change(item) for item in node]
        return node

    return change(node), count


def _save(state: dict[Any, Any], path: Path, whole: WholeState, numbers: dict[int, int], progress: Progress) -> None:
    """Write the items. ``numbers``: of the tensors, by the id() of their placeholders in ``state``."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.checkpoint.storage import WriteResult

    class FolderWriter(FileSystemWriter):
        """A writer that drops each tensor after it is written; torch's own keeps all of them until the last."""

        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            results = []
            with open(path / _DATA, "xb") as file:
                for item in plan.items:
                    offset = file.tell()
                    data = planner.resolve_data(item)
                    if isinstance(data, io.BytesIO):
                        file.write(data.getbuffer())
                    else:
                        _write_tensor(whole, numbers[id(data)], file)
                        progress(whole.tensors[numbers[id(data)]].size_bytes)
                    length = file.tell() - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(_DATA, offset, length)))
                file.flush()
                os.fsync(file.fileno())
            done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
            done.set_result(results)
            return done

        def storage_meta(self) -> None:
            """Return nothing: it would hold the path at which the folder was made."""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that nothing is distributed
        try:
            save(state, storage_writer=FolderWriter(path), no_dist=True)
        except CheckpointException as error:  # DCP wraps every exception, Ctrl-C too
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, CheckpointError | UsageError | OSError | KeyboardInterrupt | SystemExit):
                raise cause from None
            raise CheckpointError(f"DCP could not write it: {first_line(cause)}") from error


def _write_tensor(whole: WholeState, number: int, file: IO[bytes]) -> None:
    import torch

    tensor = whole.tensors[number]
    made = tensors.empty("torch", tensor.torch_name, tensor.shape)
    memory = tensors.bytes_of(made)
    assert memory is not None
    whole.read(number, memory)
    torch.save(made, file)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Imported:
    """Return a folder's state; each tensor is read when it is fetched.

    Raises UsageError for a folder that needs code or is none, CorruptCheckpoint, OSError.
    """
    library("torch", "reading DCP folders")
    try:
        data = _read_file(path / DCP_METADATA)
    except FileNotFoundError:
        raise UsageError(f"{path} is no DCP folder: it has no {DCP_METADATA}") from None
    metadata = read_metadata(data)
    items = DcpItems(path, metadata)
    state = _nested_from_ours(path, data, items.places)
    if state is None:
        values = {name: items.value(name) for name in metadata.values}
        state = _nested({metadata.paths[name]: value for name, value in {**items.places, **values}.items()})
    return Imported(state, items.fetch)


def _nested_from_ours(path: Path, metadata: bytes, places: dict[str, Any]) -> Any:
    """Return the state as it was exported, if this package wrote the folder; else None."""
    try:
        found = msgspec.json.decode(_read_file(path / _STATE), type=_State)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{path / _STATE} cannot be read: {error}") from error
    if found.metadata_sha256 != hashlib.sha256(metadata).hexdigest():
        return None
    return state_from(bytes(found.state), places)


def _read_file(path: Path) -> bytes:
    data = regular_file.read_file(path, _METADATA_LIMIT + 1, follow=False)
    if len(data) > _METADATA_LIMIT:
        raise CorruptCheckpoint(f"{path} is larger than {_METADATA_LIMIT} bytes")
    return data


class _Node(dict[Any, Any]):
    """A container of the nested state under construction."""


def _nested(values: dict[tuple[int | str, ...], Any]) -> Any:
    """Return the nested state of the values at these places.

    DCP has made strings of all keys; numbers are positions.
    """
    root = _Node()
    for place, value in values.items():
        node = root
        for key in place[:-1]:
            node = node.setdefault(key, _Node())
            if type(node) is not _Node:
                break
        if type(node) is not _Node or place[-1] in node:
            raise CorruptCheckpoint(f"{DCP_METADATA} has a value at {'.'.join(map(str, place))}, and others below it")
        node[place[-1]] = value
    return _finished(root)


def _finished(node: Any) -> Any:
    if type(node) is not _Node:
        return node
    made: Any = {key: _finished(item) for key, item in node.items()}
    if made and sorted(made, key=str) == sorted(range(len(made)), key=str):
        return [made[number] for number in range(len(made))]
    state = made.get("state")
    if "param_groups" in made and isinstance(state, dict) and all(str(key).isdecimal() for key in state):
        made["state"] = {int(key): item for key, item in state.items()}  # an optimizer's, by number
    return made
