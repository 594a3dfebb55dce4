"""What this node sees of its ranks from outside: their processes, their call rings, and the line where each one is.

A rank's line comes from Python's own ``faulthandler``, which the rank sets up at its start (``rank_main``) and a signal
calls: it needs no lock of the interpreter. A rank that cannot answer is seen like any other, but for its line.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from resilio_hpc.core.stack_dump import STACK_SIGNAL
from resilio_hpc.diagnose.hangs.call_ring import CallRing, plain
from resilio_hpc.diagnose.hangs.rank_sight import GroupSight, RankSight
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.protocol.message_parts import MOST_GROUPS
from resilio_hpc.launch.protocol.root_cause import place_of
from resilio_hpc.launch.workers import interception
from resilio_hpc.launch.workers.local_rank import LocalRank
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_notes import may_wait_s
from resilio_hpc.launch.workers.sampled_stacks import SampledStacks

ANSWER_S = 0.1  # for a rank to write its stacks
MOST_BYTES = 1 << 20
NATIVE = ".native"
_JOINS = re.compile(
    r'^ *File "[^"\n]*/torch/distributed/[^"\n]*", line \d+ in '
    r"(init_process_group|init_device_mesh|init_rpc|new_group|new_subgroups|split_group)$",
    re.MULTILINE,
)
DATA_LOADER = "data loader"
LOADERS = ("/torch/utils/data/", "/webdataset/", "/nvidia/dali/", "/ffcv/", "/grain/", "/datasets/iterable_dataset.py")


class RankLook:
    """Looks at the ranks of the present round."""

    def __init__(self, arena_dir: Path, pids: Mapping[int, int]) -> None:
        """Take where the rings are, and a live view of the ranks' processes, by local rank."""
        self._arena_dir = arena_dir
        self._pids = pids
        self._rings: dict[int, CallRing] = {}
        self._ended: dict[int, int] = {}  # processes that have ended, by local rank
        self._round = -1
        self._stacks: Mapping[int, Path] = {}
        self._kept: dict[int, Path] = {}
        self._sizes: dict[int, int] = {}
        self._due: float | None = None
        self._number = -1
        self._sampled = SampledStacks()

    def begin(self, round_number: int, stacks: Mapping[int, Path], kept: Mapping[int, Path] | None = None) -> None:
        """Take a new round.

        ``stacks``: by local rank, the file for its stacks; ``kept``: where it goes when the round is over, if there is
        something in it. What was sampled goes beside it.
        """
        self.close()
        self._ended.clear()
        self._round, self._stacks, self._kept, self._due = round_number, dict(stacks), dict(kept or {}), None
        with contextlib.suppress(OSError):
            interception.remove_older(self._arena_dir, round_number)

    def forget(self, local_rank: int) -> None:
        """Drop the ring of a rank's process that has ended: the next one makes its own."""
        self._ended.pop(local_rank, None)
        ring = self._rings.pop(local_rank, None)
        if ring is not None:
            ring.close()
        with contextlib.suppress(OSError):
            interception.ring_file(self._arena_dir, self._round, local_rank).unlink()

    def ended(self, local_rank: int, pid: int) -> None:
        """Take note that a rank's process has ended, and has left the view of processes."""
        self._ended[local_rank] = pid
        self._ring(local_rank)

    def calls(self, local: LocalRound | None) -> int:
        """Return how many calls were begun and completed by the node's ranks; -1 unless each one has a ring."""
        ranks = local.ranks if local is not None else {}
        found = [ring for number in ranks if (ring := self._ring(number)) is not None]
        return sum(sum(ring.counts) + ring.unlisted for ring in found) if 0 < len(found) == len(ranks) else -1

    def entered(self, local_rank: int) -> tuple[GroupSight, ...]:
        """Return a rank's communicators and how many of their calls it has entered; also of one that has just ended."""
        ring = self._ring(local_rank)
        return ring.groups(MOST_GROUPS) if ring is not None else ()

    def ask(self, number: int, stacks: bool, sampled: Collection[int] = ()) -> None:
        """Begin a look, whose ``answer`` is due soon. ``stacks``: ranks write theirs first.

        ``sampled``: local ranks whose native stacks are sampled, beside the file of their own.
        """
        self._sampled.ask({
            self._pids[one]: self._stacks[one].with_suffix(NATIVE)
            for one in sampled if one in self._pids and one in self._stacks
        })  # fmt: skip
        self._number, self._due = number, time.monotonic() + (ANSWER_S if stacks else 0.0)
        for local_rank, pid in self._pids.items():
            path = self._stacks.get(local_rank)
            self._sizes[local_rank] = _size(path)
            if not stacks:
                continue
            # else the signal is the program's own, or would end it
            if path is not None and path.exists() and process_tree.handles(pid, STACK_SIGNAL):
                with contextlib.suppress(OSError):
                    os.kill(pid, STACK_SIGNAL)

    def answer(self, local: LocalRound) -> tuple[int, tuple[RankSight, ...]] | None:
        """Return the look's number and what is seen, once that is due."""
        self._sampled.tick()
        if self._due is None or time.monotonic() < self._due:
            return None
        self._due = None
        return self._number, tuple(self._sight(rank, number, len(local.ranks))
                                   for number, rank in local.ranks.items())  # fmt: skip

    def _sight(self, rank: LocalRank, local_rank: int, ranks: int) -> RankSight:
        pid = self._pids.get(local_rank)
        state, waits_in, cpu_s = _facts(pid) if pid is not None else ("", "", 0.0)
        if state == "t" and self._sampled.suspends(pid):
            state = "S"  # by our own sampler, and by no debugger
        ring = self._ring(local_rank)
        begun, completed = (one + ring.unlisted for one in ring.counts) if ring is not None else (-1, -1)
        groups, calls = ring.look(ranks) if ring is not None else ((), ())
        stack = self._stack(local_rank)
        within = DATA_LOADER if any(part in stack for part in LOADERS) else ""
        place, joins = place_of(stack)[:300], joins_in(stack)
        gpu = ring.gpu() if ring is not None else None
        return RankSight(
            rank.rank, rank.step, state, waits_in, cpu_s, begun, completed, groups, calls, place, joins, gpu, within,
            self._may_wait_s(local_rank, pid),
        )  # fmt: skip

    def _may_wait_s(self, local_rank: int, pid: int | None) -> float:
        """Return the longest time limit of a rank's process groups (``core.gloo_groups``), 0 where it told none."""
        path = self._stacks.get(local_rank)
        return may_wait_s(path, pid) if path is not None and pid is not None else 0.0  # beside the error file, too

    def _ring(self, local_rank: int) -> CallRing | None:
        """Return the ring of a rank's own process, once there is one: a program that it starts may have been first.

        That of a process that has ended stays until the rank starts again.
        """
        process = self._pids.get(local_rank, self._ended.get(local_rank))
        if local_rank not in self._rings and process is not None:
            with contextlib.suppress(OSError):
                self._rings[local_rank] = CallRing(interception.ring_file(self._arena_dir, self._round, local_rank))
        found = self._rings.get(local_rank)
        return found if found is not None and found.process == process else None

    def _stack(self, local_rank: int) -> str:
        """Return the main thread's stack that the rank wrote since it was asked; "" without one."""
        path = self._stacks.get(local_rank)
        begins = self._sizes.get(local_rank, 0)
        try:
            assert path is not None
            with path.open("rb") as file:
                file.seek(begins)
                text = file.read(MOST_BYTES).decode("utf-8", "replace")
        except (OSError, AssertionError):
            return ""
        return main_thread(text)

    def close(self) -> None:
        """Close the rings, end a sample that is under way, and keep the stacks."""
        self._sampled.close()
        for number, target in self._kept.items():
            for source in (self._stacks[number], self._stacks[number].with_suffix(NATIVE)):
                if _size(source):
                    with contextlib.suppress(OSError):
                        target.with_suffix(source.suffix).write_bytes(source.read_bytes()[-MOST_BYTES:])
        self._kept = {}
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()


def process_facts(pid: int) -> tuple[str, str, float]:
    """Return the kernel's letter for a process, the function in which it sleeps, and its processor time in seconds.

    "" and 0 where it is not there. Nothing here waits for the process, as reading its command line may.
    """
    fields = process_tree.stat(pid)
    if not fields:
        return "", "", 0.0
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    try:
        waits_in = plain(Path(f"/proc/{pid}/wchan").read_text().strip("\0\n "))
    except OSError:
        waits_in = ""
    return fields[0].decode(), "" if waits_in == "0" else waits_in, cpu_s


def _facts(pid: int) -> tuple[str, str, float]:
    """Return what the kernel knows of a rank. One that waits for a child that waits for a disk waits for the disk."""
    state, waits_in, cpu_s = process_facts(pid)
    if state == "S":
        for child in process_tree.descendants(pid):
            child_state, child_waits_in, _ = process_facts(child)
            if child_state == "D":
                return child_state, child_waits_in, cpu_s
    return state, waits_in, cpu_s


def joins_in(stack: str) -> str:
    """Return the function of torch.distributed in which a rank waits for its peers to come; "" where it is in none."""
    found = _JOINS.search(stack)
    return found[1] if found else ""


def main_thread(text: str) -> str:
    """Return the main thread's stack of a dump, the outermost call first, as a traceback has it.

    The signal is handled by the main thread, unless that one blocks it; it is the last of the dump.
    """
    blocks = text.split("hread 0x")
    current = [block for block, before in zip(blocks[1:], blocks, strict=False) if before.endswith("Current t")]
    return "\n".join(reversed((current or blocks)[-1].splitlines()))


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path is not None else 0
    except OSError:
        return 0
