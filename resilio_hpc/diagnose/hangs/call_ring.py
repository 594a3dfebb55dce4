"""Reads the ring that `native/intercept` writes in each rank: its calls, whatever has become of the process.

The file is not trusted: each number is bounded, and a record that is being overwritten is left out.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resilio_hpc.core import regular_file
from resilio_hpc.diagnose.hangs.rank_sight import MAX_CALLS, MAX_GROUPS, CallSight, GpuSight, GroupSight

MAGIC = b"RSLCALLS"
VERSION = 2
LANES, GROUPS, CAPACITY = 64, 256, 2048
QUEUED = ("nccl",)  # families whose calls return when they are queued: the end of few of them is seen
_HEADER = struct.Struct("<8s4I3QI4xQ")
_GPU = struct.Struct("<5Q24x")
_LANE = struct.Struct("<2I5Qd2Q56x")
_GROUP = struct.Struct("<QiiQQ8sQ16x")
_RECORD = struct.Struct("<6QI4BiI")
_RAW = struct.Struct("<3Q8xQ8xI3B9x")  # the same, without what times do not need
_GROUPS = _HEADER.size + _GPU.size + LANES * _LANE.size
_RECORDS = _GROUPS + GROUPS * _GROUP.size
SIZE = _RECORDS + CAPACITY * _RECORD.size
SHARED = 1024  # communicators, and calls, of all ranks in one message, which must stay far below a mebibyte
SIZES = (0, 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)  # bytes of each dtype; 0: not known
_NUMBER = (1 << 53) - 1
_BLOCKS, _IN_FLIGHT, _WAITED_FOR = range(3)

WAITS = ("", "a stream", "the device", "an event", "a copy", "freed memory")
OPS = (
    "other", "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter",
    "barrier", "send", "recv", "scan", "communicator",
)  # fmt: skip
DTYPES = (
    "", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16",
    "float8_e4m3", "float8_e5m2",
)  # fmt: skip


class RawCall(NamedTuple):
    """A record as it stands in the ring. ``stamp``: its number + 1, once it is whole; times by CLOCK_MONOTONIC."""

    stamp: int
    entered_ns: int
    completed_ns: int
    elements: int
    group: int
    op: int
    dtype: int
    state: int


class CallRing:
    """The open ring of one rank. ``begun`` and ``completed`` are cheap; ``look`` reads all of it."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises OSError where there is none, or it is not one of this version."""
        self._file = regular_file.open_file(path, follow=False)
        try:
            magic, version, size, capacity, groups, self.process, *_ = self._header()
            if (magic, version, size, capacity, groups) != (MAGIC, VERSION, _RECORD.size, CAPACITY, GROUPS):
                raise OSError(f"{path} is no call ring of this version")
        except OSError:
            os.close(self._file)
            raise

    def _header(self) -> tuple[Any, ...]:
        """Read it: a mapped file could be cut short, and then end the reader."""
        return _HEADER.unpack(os.pread(self._file, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many calls were begun and completed so far."""
        *_, begun, completed, _, _ = self._header()
        return begun & _NUMBER, completed & _NUMBER

    @property
    def unlisted(self) -> int:
        """Return how many calls were begun in communicators beyond GROUPS, of which nothing else is known."""
        return int(self._header()[9]) & _NUMBER

    def look(self, ranks: int = 1) -> tuple[tuple[GroupSight, ...], tuple[CallSight, ...]]:
        """Return the communicators, and of each the calls that are not completed and the last one, oldest first.

        Of too many communicators the last ones are kept; of too many calls the first that wait, of a QUEUED family the
        last ones. There the end of a call is the end of all before it on the same stream; where no end was seen, all
        but the last count as done. ``ranks``: whose looks share one message.
        """
        most_groups, most_calls = (max(2, min(most, SHARED // ranks)) for most in (MAX_GROUPS, MAX_CALLS))
        memory = os.pread(self._file, SIZE, 0).ljust(SIZE, b"\0")
        stamps = os.pread(self._file, SIZE, 0).ljust(SIZE, b"\0")  # what changed meanwhile is not whole
        groups = _groups(memory)
        last: dict[int, CallSight] = {}
        open_calls: dict[int, list[tuple[CallSight, int]]] = defaultdict(list)  # and their streams
        bounded: set[int] = set()  # communicators of which a queued call was seen to end
        for call, stream in _records(memory, stamps):
            if call.group not in groups:
                continue
            last[call.group] = call
            still_open = open_calls[call.group]
            if groups[call.group].family in QUEUED and not call.blocks:
                if call.completed:
                    bounded.add(call.group)
                    still_open[:] = [one for one in still_open if one[1] != stream]
                elif call.group not in bounded:
                    still_open.clear()
            if not call.completed:
                still_open.append((call, stream))
        waiting = {number: [call for call, _ in found] for number, found in open_calls.items() if found}
        chosen = sorted(groups, key=lambda number: (number in waiting, number))[-most_groups:]
        place = {number: at for at, number in enumerate(sorted(chosen))}
        calls = []
        share = max(1, most_calls // max(1, len(waiting)))
        for number in sorted(chosen):
            found = waiting.get(number, [])
            is_queued = groups[number].family in QUEUED
            if not is_queued:  # sends whose end no program asks for may be many
                found.sort(key=lambda call: not call.awaited)
            kept = found[-share:] if is_queued else found[:share]
            if last.get(number) is not None and last[number] not in kept:
                kept.append(last[number])
            calls += kept
        named = tuple(_with_group(call, place[call.group]) for call in calls[: most_groups + most_calls])
        return tuple(groups[number] for number in sorted(chosen)), named

    def groups(self, most: int) -> tuple[GroupSight, ...]:
        """Return the last communicators, and how many calls of each were entered; the calls are not read."""
        found = _groups(os.pread(self._file, _RECORDS, 0).ljust(_RECORDS, b"\0"))
        return tuple(found[number] for number in sorted(found)[-most:])

    def table(self) -> tuple[bytes, list[int]]:
        """Return the table of records as it is, and the communicators whose calls are not seen to complete."""
        memory = os.pread(self._file, SIZE, 0).ljust(SIZE, b"\0")
        groups = _groups(memory)
        return memory[_RECORDS:], [number for number, group in groups.items() if group.family in QUEUED]

    def gpu(self) -> GpuSight | None:
        """Return what the process asked of its GPU; None where that is nothing."""
        memory = os.pread(self._file, _GROUPS, 0).ljust(_GROUPS, b"\0")
        sampled, reached, reached_ns, _, _ = _GPU.unpack_from(memory, _HEADER.size)
        lanes = list(_LANE.iter_unpack(memory[_HEADER.size + _GPU.size :]))
        _, _, _, launches, launched, graphs, gemms, _, waits, _ = (sum(column) for column in zip(*lanes, strict=True))
        if not launches + gemms + waits:
            return None
        now_ns = time.monotonic_ns()
        oldest_ns, kind = min(((lane[2], lane[1]) for lane in lanes if 0 < lane[1] < len(WAITS)), default=(now_ns, 0))
        flops = sum(lane[7] for lane in lanes if 0.0 <= lane[7] < math.inf)
        return GpuSight(
            WAITS[kind],
            _seconds(now_ns - oldest_ns),
            launches & _NUMBER,
            max(0, launches - launched) & _NUMBER,
            graphs & _NUMBER,
            gemms & _NUMBER,
            min(flops, 1e300),
            waits & _NUMBER,
            sampled & _NUMBER,
            reached & _NUMBER,
            _seconds(now_ns - reached_ns) if reached else -1.0,
        )

    def since(self, first: int) -> list[RawCall]:
        """Return the records from number ``first`` on, oldest first, up to one that is being written.

        Those that are overwritten by now are left out.
        """
        begun = self._header()[6]
        number = first = max(first, begun - CAPACITY)
        memory = b""
        while number < begun:
            many = min(begun - number, CAPACITY - number % CAPACITY)
            memory += os.pread(self._file, many * _RAW.size, _RECORDS + number % CAPACITY * _RAW.size)
            number += many
        found = []
        for number, fields in enumerate(_RAW.iter_unpack(memory[: len(memory) // _RAW.size * _RAW.size]), first):
            if fields[0] <= number:
                break
            if fields[0] == number + 1:
                found.append(RawCall(*fields))
        oldest = self._header()[6] - CAPACITY
        return [call for call in found if call.stamp > oldest]

    def in_queue(self) -> frozenset[int]:
        """Return the communicators whose calls are not seen to complete."""
        memory = os.pread(self._file, _RECORDS, 0).ljust(_RECORDS, b"\0")
        return frozenset(number for number, group in _groups(memory).items() if group.family in QUEUED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _groups(memory: bytes) -> dict[int, GroupSight]:
    """Return the communicators by their number in the ring."""
    used = min(_HEADER.unpack_from(memory, 0)[8], GROUPS)
    found = {}
    for number in range(used):
        key, rank, size, entered, _, family, _ = _GROUP.unpack_from(memory, _GROUPS + number * _GROUP.size)
        if key:
            name = plain(family.rstrip(b"\0").decode("ascii", "replace"))
            found[number] = GroupSight(key & _NUMBER, name, max(rank, -1), max(size, -1), entered & _NUMBER)
    return found


def _records(memory: bytes, again: bytes) -> Iterator[tuple[CallSight, int]]:
    """Yield the whole records and their streams, oldest first. ``again``: read later; what differs was overwritten."""
    begun = _HEADER.unpack_from(memory, 0)[6]
    for index in range(max(0, begun - CAPACITY), begun):
        at = _RECORDS + (index % CAPACITY) * _RECORD.size
        stamp, _, done_ns, sequence, count, stream, group, op, dtype, state, _, peer, captured = _RECORD.unpack_from(
            memory, at
        )
        if stamp != index + 1 or captured or memory[at : at + 8] != again[at : at + 8]:
            continue
        shape = f"{count & _NUMBER} {DTYPES[dtype] if dtype < len(DTYPES) else ''}".strip() if count else ""
        name = OPS[op] if op < len(OPS) else OPS[0]
        blocks, awaited = state in (_BLOCKS, _WAITED_FOR), state != _IN_FLIGHT
        call = CallSight(group, name, sequence & _NUMBER, shape, max(peer, -1), done_ns != 0, blocks, awaited)
        yield call, stream


def _seconds(passed_ns: int) -> float:
    return min(max(passed_ns, 0) / 1e9, 1e12)


def plain(text: str) -> str:
    """Return what a message may hold of a text."""
    return "".join(letter for letter in text if letter.isascii() and letter.isprintable())[:64]


def _with_group(call: CallSight, group: int) -> CallSight:
    return msgspec.structs.replace(call, group=group)
