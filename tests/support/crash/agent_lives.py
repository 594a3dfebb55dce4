"""The parts of an agent's node, in forked children that may be harmed: the saver, and ranks that fill arenas."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.saver import saver as saver_process
from resilio_hpc.ckpt.saver.messages import Commit, Committed, Persist, Persisted, decode_answer
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.json_lines import encode_line
from tests.support.crash.harm import Harm, arm
from tests.support.crash.lives import RETENTION, end_of, fork, is_state_of, state_of

WORLD = 2
ARENA_MIB = {1: 1, 2: 2, 3: 3, 4: 80, 5: 3, 6: 3, 7: 3}
"""The arenas grow, and the one that became far too large shrinks again."""


def arenas_of(directory: Path, step: int) -> list[str]:
    """Snapshots of ``step`` of both ranks of a node; their arenas."""
    paths = []
    for rank in range(WORLD):
        where = directory / f"step{step}"
        where.mkdir(parents=True, exist_ok=True)
        pair = ArenaPair(where, Owner(rank, rank, WORLD, WORLD, 0, "own", "run"), directory / "spill")
        with ThreadPoolExecutor(1) as pool:
            paths.append(str(Snapshot(pair, step, flatten(state_of(step, rank)), pool).finish()[0]))
        pair.close()
    return paths


def persist_and_commit(directory: Path, arenas: Sequence[str], step: int, harm: Harm | None) -> bool:
    """A saver process is asked both, as an agent does. False: it was killed."""
    directory.mkdir(parents=True, exist_ok=True)
    requests, ask = os.pipe()
    hear, answers = os.pipe()

    def serve() -> None:
        os.dup2(requests, 0)
        os.dup2(answers, 1)
        for fd in (requests, ask, hear, answers):
            os.close(fd)
        if harm is not None:
            arm(harm, directory)
        assert saver_process.main() == 0

    child = fork(serve)
    os.close(requests)
    os.close(answers)
    with os.fdopen(ask, "wb", buffering=0) as to, os.fdopen(hear, "rb") as answered:
        to.write(encode_line(Persist(step, 1, 0, WORLD, 0, list(arenas), str(directory))))
        if line := answered.readline():
            persisted = decode_answer(line)
            assert isinstance(persisted, Persisted), persisted
            if harm is not None and harm.log is not None:
                with harm.log.open("a") as log:  # what was promised, among what was done
                    print("0", "persisted", directory / f".staging-step-{step:010d}-e1-r0", "", sep="\t", file=log)
            request = Commit(step, 1, 0, WORLD, str(directory), [persisted.record], RETENTION)
            to.write(encode_line(request))
            if line := answered.readline():
                committed = decode_answer(line)
                assert isinstance(committed, Committed), committed
    code = end_of(child)
    assert code == -9 or (code == 0 and line), code  # it may be killed after its last answer, too
    return code == 0


def sized(step: int) -> dict[str, object]:
    """The state of a step, as large as ARENA_MIB says."""
    return state_of(step) | {"more": np.full(ARENA_MIB.get(step, 1) << 17, step)}


def save_to_arenas(directory: Path, harm: Harm, on_disk: bool) -> bool:
    """A rank takes snapshots of the steps of ARENA_MIB and notes which are whole. False: it was killed."""
    told = directory.with_name("whole")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    told.unlink(missing_ok=True)

    def rank() -> None:
        arm(harm, directory)
        pair = ArenaPair(directory, Owner(0, 0, 1, 1, 0, "own", "run"), directory / "spill", on_disk)
        with ThreadPoolExecutor(1) as pool, told.open("w") as known:
            for step in ARENA_MIB:
                Snapshot(pair, step, flatten(sized(step)), pool).finish()
                print(step, file=known, flush=True)

    code = end_of(fork(rank))
    assert code in (0, -9), code
    return code == 0


def check_arenas(directory: Path) -> int:
    """The newest snapshot, which is whole and the last one that the rank knew of, or the one after it; 0: none.

    Both arenas hold what they say, and the next life of the rank can save.
    """
    known = directory.with_name("whole")
    whole = [int(line) for line in known.read_text().split()] if known.exists() else []
    last = whole[-1] if whole else 0
    found = 0
    for held in arena.scan(directory):
        with ArenaSource(held.path) as source, ThreadPoolExecutor(1) as pool:
            state = restore(source, None, pool)
        assert is_state_of(state, held.step)
        assert np.array_equal(state["more"], sized(held.step)["more"])
        found = max(found, held.step)
    assert found in (last, last + 1), f"step {last} was whole, the newest now is {found}"

    def next_life() -> None:
        pair = ArenaPair(directory, Owner(0, 0, 1, 1, 1, "own", "run"), directory / "spill")
        with ThreadPoolExecutor(1) as pool:
            for step in (found + 1, found + 2):
                Snapshot(pair, step, flatten(sized(step)), pool).finish()

    assert end_of(fork(next_life)) == 0
    assert sorted(held.step for held in arena.scan(directory)) == [found + 1, found + 2]
    return found
