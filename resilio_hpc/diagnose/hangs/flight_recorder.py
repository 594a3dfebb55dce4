"""Dumps of PyTorch's flight recorder, one file per rank: pickled (its default) or JSON.

Their fields: torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2. A pickle is read without its power to call
anything: one that names a class or function is refused.
"""

from __future__ import annotations

import io
import json
import pickle  # noqa: TID251 - what PyTorch wrote, read without classes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from resilio_hpc.core import regular_file
from resilio_hpc.core.errors import UsageError, os_error_text
from resilio_hpc.core.json_fields import printable
from resilio_hpc.diagnose.hangs.calls import CollectiveCall, RankCalls

MOST_BYTES = 256 << 20
_DEFAULT = "group 0"
_NUMBER = re.compile(r"(\d+)(?:\.\w+)?$")
_PEER = re.compile(r"(\d+)\s*(->|<-)\s*(\d+)")
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>")


class RecordedRank(msgspec.Struct, frozen=True):
    """A dump. ``members``: the ranks of each communicator, () where the recorder does not know them."""

    calls: RankCalls
    members: dict[str, tuple[int, ...]]


class _NoClasses(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def is_dump(path: Path) -> bool:
    """Return whether a file begins like a dump, and has a rank's number in its name."""
    try:
        head = regular_file.read_file(path, 4096)
    except OSError:
        return False
    begins = head.startswith(b"\x80") or (head.startswith(b"{") and b'"comm_lib_version"' in head)
    return begins and _NUMBER.search(path.name) is not None


def read(path: Path) -> RecordedRank:
    """Return a dump. Raises UsageError where it is none. The rank is the number at the end of the file's name."""
    found = _NUMBER.search(path.name)
    if found is None:
        raise UsageError(f"{path}: the name of a flight recorder's dump ends in the rank's number")
    try:
        if regular_file.size_of(path) > MOST_BYTES:
            raise UsageError(f"{path} is larger than a flight recorder's dump ({MOST_BYTES >> 20} MiB)")
        data = regular_file.read_file(path, MOST_BYTES)
        whole = json.loads(data) if data.startswith(b"{") else _NoClasses(io.BytesIO(data)).load()
    except OSError as error:
        raise UsageError(os_error_text(error, str(path))) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises nearly anything
        raise UsageError(f"{path} is no dump of a flight recorder: {printable(str(error), 200)}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("entries"), list):
        raise UsageError(f"{path} is no dump of a flight recorder: it has no entries")
    return _recorded(int(found[1]), whole)


def _recorded(rank: int, whole: Mapping[str, Any]) -> RecordedRank:
    calls: dict[str, list[CollectiveCall]] = {}
    names: dict[str, str] = {}
    for entry in whole["entries"]:
        if not isinstance(entry, dict):
            continue
        group = entry.get("process_group") or ("?", "")
        number, about = (str(part) for part in (*group, "", "")[:2])
        call = _call(entry, _members(number, whole))
        if call is None:
            continue
        names[number] = f"group {number} ({about})" if about not in ("", "undefined") else f"group {number}"
        calls.setdefault(names[number], []).append(call)
    members = {name: _members(number, whole) for number, name in names.items()}
    for found in calls.values():
        found.sort(key=lambda call: call.sequence)
    return RecordedRank(RankCalls(rank, calls), members)


def _call(entry: Mapping[str, Any], members: tuple[int, ...]) -> CollectiveCall | None:
    """Return a call; None for a send or receive whose peer is not known. Peers are numbered within their group."""
    name = str(entry.get("profiling_name") or "?")
    op = name.rpartition(":")[2].split(" ")[0]
    peer = -1
    is_p2p = entry.get("is_p2p") is True
    if is_p2p:
        if (found := _PEER.search(name)) is None:
            return None
        peer = int(found[3])
        peer = members[peer] if peer < len(members) else peer
    sequence = _whole(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
    # gloo's calls stay "scheduled"; NCCL's are retired when they are aborted, too
    completed = entry.get("state") == "completed" or (entry.get("retired") is True and not name.startswith("nccl:"))
    return CollectiveCall(sequence, op, _shape(op, entry), completed, peer, _place(entry.get("frames")))


def _shape(op: str, entry: Mapping[str, Any]) -> str:
    """Return dtype and number of elements, where all ranks must have the same."""
    if any(word in op for word in ("gather", "scatter", "all_to_all", "alltoall")):
        return ""  # sizes may differ from rank to rank
    elements = [_product(sizes) for sizes in entry.get("input_sizes") or [] if isinstance(sizes, list | tuple)]
    dtypes = [str(dtype) for dtype in entry.get("input_dtypes") or []]
    return " ".join([*dtypes, *map(str, elements)])[:200]


def _product(sizes: Any) -> int:
    result = 1
    for size in sizes:
        result *= _whole(size)
    return result


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _place(frames: Any) -> str:
    """Return the program's innermost own line, as ``train.py:88``."""
    for frame in frames if isinstance(frames, list | tuple) else ():
        if isinstance(frame, dict) and not any(part in str(frame.get("filename")) for part in _INSTALLED):
            return f"{str(frame.get('filename')).rpartition('/')[2]}:{frame.get('line')}"
    return ""


def _members(number: str, whole: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a group's ranks, () where they are not known; the default group may stand there without a name."""
    config = whole.get("pg_config")
    config = config if isinstance(config, dict) else {}
    about = config.get(number) or (config.get("") if number == "0" else None) or {}
    text = str(about.get("ranks", "")) if isinstance(about, dict) else ""
    return tuple(int(part) for part in re.findall(r"\d{1,9}", text)[: 1 << 20])


def members_of(dumps: Sequence[RecordedRank]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each communicator.

    Over gloo the recorder does not know them: they are the ranks that called it and, of the default group, all ranks up
    to the highest, so that one without a dump is missed.
    """
    found: dict[str, set[int]] = {}
    highest = max((dump.calls.rank for dump in dumps), default=0)
    for dump in dumps:
        for name, ranks in dump.members.items():
            found.setdefault(name, set()).update(ranks or (dump.calls.rank,))
            if not ranks and name.split(" (")[0] == _DEFAULT:
                found[name].update(range(highest + 1))
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}
