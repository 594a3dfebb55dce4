"""Kill a life at every single I/O call of its save, and see what the next one finds: run by test_kill_everywhere.

argv: a scenario, a directory. Prints a JSON object: how often each call was recorded, and each step left.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.view import why_wrong
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from tests.support.crash.agent_lives import arenas_of, check_arenas, persist_and_commit, save_to_arenas
from tests.support.crash.harm import Call, Harm, arm, read_log, tried
from tests.support.crash.lives import check, check_disk, check_nothing_is_left, copy_of, end_of, fork, save

Result = tuple[Sequence[Call], Counter[int]]
WRITES = ("write", "pwrite", "uring")
PEERS_TIMEOUT_S = 0.1
SLACK = 5
"""Either of two processes makes the directory that both need: so many calls are made by one or the other."""


def harms(calls: Sequence[Call]) -> Iterator[tuple[Harm, Call]]:
    """A kill before each call, and in the middle of each write."""
    for call in calls:
        if call.name == "persisted":  # what was promised, not a call
            continue
        yield Harm("kill", call.number), call
        if call.name in WRITES:
            yield Harm("tear", call.number), call


def kills(calls: Sequence[Call]) -> Iterator[tuple[Harm, Call]]:
    """A kill before each call."""
    return ((harm, call) for harm, call in harms(calls) if harm.mode == "kill")


def for_each(harms: Iterable[tuple[Harm, Call]], act: Callable[[Harm], int]) -> Result:
    """The step that ``act`` finds after each harm that is tried."""
    left: Counter[int] = Counter()
    calls = []
    for harm, call in tried(harms):
        try:
            left[act(harm)] += 1
        except AssertionError as error:
            raise AssertionError(f"{harm.mode} at {call}: {error}") from error
        calls.append(call)
    return calls, left


def alone(directory: Path) -> Result:
    """One process that saves step 2, with step 1 committed. The next life saves step 3, or 2 once more."""
    base, work, log = directory / "base", directory / "work", directory / "log"
    assert save(base, [1], [None]) == ["committed"]
    assert save(copy_of(base, work), [2], [Harm(log=log)]) == ["committed"]

    def act(harm: Harm) -> int:
        said = save(copy_of(base, work), [2], [harm])
        assert said == ["killed"], said
        left = check(work, [1, 2])
        assert save(work, [2 + harm.at % 2], [None]) == ["committed"]
        check(work, [2 + harm.at % 2])
        check_nothing_is_left(work)
        return left

    return for_each(harms(read_log(log)), act)


def by_disk(directory: Path) -> Result:
    """As ``alone``, by way of the node's own disk, where the next life looks first."""
    work, disk, log = directory / "work", directory / "disk", directory / "log"
    disk.mkdir()
    assert save(work, [1], [None], local=disk) == ["committed"]
    base, base_disk = copy_of(work, directory / "base"), copy_of(disk, directory / "base disk")

    def life(harm: Harm) -> list[str]:
        copy_of(base, work)
        copy_of(base_disk, disk)
        return save(work, [2], [harm], local=disk)

    assert life(Harm(log=log)) == ["committed"]

    def act(harm: Harm) -> int:
        said = life(harm)
        assert said == ["killed"], said
        left = check(work, [1, 2])
        assert check(work, [left], local=disk) == left
        assert save(work, [2 + harm.at % 2], [None], local=disk) == ["committed"]
        check(work, [2 + harm.at % 2], local=disk)
        check_nothing_is_left(work)
        assert save(work, [4], [None], local=disk) == ["committed"]
        check_disk(disk, [2 + harm.at % 2, 4])
        return left

    return for_each(harms(read_log(log)), act)


def first(directory: Path) -> Result:
    """The very first save, into a directory that is not there yet. 0: nothing is left."""
    work, log = directory / "runs" / "work", directory / "log"
    assert save(copy_of(directory / "none", work).joinpath("new"), [1], [Harm(log=log)]) == ["committed"]

    def act(harm: Harm) -> int:
        new = copy_of(directory / "none", work) / "new"
        said = save(new, [1], [harm])
        assert said == ["killed"], said
        left = check(new, [0, 1])
        assert save(new, [2], [None]) == ["committed"]
        check(new, [2])
        check_nothing_is_left(new)
        return left

    return for_each(kills(read_log(log)), act)


def again(directory: Path) -> Result:
    """Step 2, which alone is committed, is saved again: at no instant it is not there."""
    base, work, log = directory / "base", directory / "work", directory / "log"
    assert save(base, [2], [None]) == ["committed"]
    assert save(copy_of(base, work), [2], [Harm(log=log)]) == ["committed"]

    def act(harm: Harm) -> int:
        said = save(copy_of(base, work), [2], [harm])
        assert said == ["killed"], said
        left = check(work, [2])
        assert save(work, [2 + harm.at % 2], [None]) == ["committed"]
        check(work, [2 + harm.at % 2])
        assert save(work, [4], [None]) == ["committed"]
        check_nothing_is_left(work)
        return left

    return for_each(kills(read_log(log)), act)


def saver_alone(directory: Path) -> Result:
    """The saver is a process of its own, and is killed. Its Checkpointer is told."""
    base, work, log = directory / "base", directory / "work", directory / "log"
    assert save(base, [1], [None]) == ["committed"]
    assert save(copy_of(base, work), [2], [Harm(log=log)], own_process=True) == ["committed"]

    def act(harm: Harm) -> int:
        (said,) = save(copy_of(base, work), [2], [harm], own_process=True)
        assert "step 2 was not saved (committed): the process that was writing it was killed by SIGKILL" in said, said
        left = check(work, [1, 2])
        assert save(work, [2 + harm.at % 2], [None]) == ["committed"]
        check_nothing_is_left(work)
        return left

    return for_each(harms(read_log(log)), act)


def orphan(directory: Path) -> Result:
    """Whoever asked is killed while its saver makes that call: the step is there all the same, and nothing else."""
    base, work, log = directory / "base", directory / "work", directory / "log"
    assert save(base, [1], [None]) == ["committed"]
    assert save(copy_of(base, work), [2], [Harm(log=log)], own_process=True) == ["committed"]

    def act(harm: Harm) -> int:
        said = save(copy_of(base, work), [2], [harm], own_process=True)
        assert said == ["killed"], said
        check_nothing_is_left(work)
        return check(work, [2])

    calls = [call for call in read_log(log) if call.name != "persisted"]
    return for_each(((Harm("orphan", call.number), call) for call in calls), act)


def two(directory: Path, victim: int) -> Result:
    """Two processes. The other one is told that the step was not saved, or it was."""
    base, work, log = directory / "base", directory / "work", directory / "log"
    assert save(base, [1], [None, None]) == ["committed"] * 2

    def life(harm: Harm, **options: float) -> list[str]:
        ranks = [None, None, harm, None]
        return save(copy_of(base, work), [2], ranks[2 - victim : 4 - victim], **options)

    assert life(Harm(log=log)) == ["committed"] * 2
    calls = read_log(log)

    def act(harm: Harm) -> int:
        said = life(harm, peers_timeout_s=PEERS_TIMEOUT_S)
        assert said[victim] == "killed" or harm.at > len(calls) - SLACK, said
        left = check(work, [1, 2], 2)
        other = said[1 - victim]
        assert left == 2 if other == "committed" else "was not saved" in other, said
        assert save(work, [2 + harm.at % 2], [None, None]) == ["committed"] * 2
        check(work, [2 + harm.at % 2], 2)
        check_nothing_is_left(work, 2)
        return left

    more = [(Harm("kill", len(calls) + number), calls[-1]) for number in range(1, SLACK)]
    return for_each([*kills(calls), *more], act)


def saver(directory: Path) -> Result:
    """The saver process of an agent. Another one is asked the same once more."""
    base, work, log, arenas = directory / "base", directory / "work", directory / "log", directory / "arenas"
    assert persist_and_commit(base, arenas_of(arenas, 1), 1, None)
    paths = arenas_of(arenas, 2)
    assert persist_and_commit(copy_of(base, work), paths, 2, Harm(log=log))

    def act(harm: Harm) -> int:
        assert not persist_and_commit(copy_of(base, work), paths, 2, harm)
        left = check(work, [1, 2], 2)
        assert persist_and_commit(work, paths, 2, None)
        check(work, [2], 2)
        check_nothing_is_left(work, 2, nodes=1)
        return left

    return for_each(harms(read_log(log)), act)


def prune(directory: Path) -> Result:
    """A save after which four older steps go. Those that are to be kept stay, and what is there is whole."""
    base, work, log = directory / "base", directory / "work", directory / "log"
    assert save(base, range(1, 7), [None], retention=Retention(9)) == ["committed"]
    keep = Retention(1, keep_every=3)
    assert save(copy_of(base, work), [7], [Harm(log=log)], retention=keep) == ["committed"]

    def act(harm: Harm) -> int:
        said = save(copy_of(base, work), [7], [harm], retention=keep)
        assert said == ["killed"], said
        left = check(work, [6, 7])
        assert {3, 6} <= set(checkpoint_index.committed_steps(work))
        assert save(work, [8], [None], retention=keep) == ["committed"]
        assert checkpoint_index.committed_steps(work) == [3, 6, 8]
        check_nothing_is_left(work)
        return left

    return for_each(kills(read_log(log)), act)


def view(directory: Path) -> Result:
    """``resilio ckpt show --h5`` makes checkpoint.h5 anew. 1: the former one is there; 2: the new one."""
    base, work, log = directory / "base", directory / "work", directory / "log"
    assert save(base, [1], [None]) == ["committed"]
    where = Path("step-0000000001", "checkpoint.h5")

    def made(harm: Harm) -> int:
        def act() -> None:
            arm(harm, work)
            assert resilio_ckpt(["show", "--json", "--h5", str(work), "1"]) == 0

        with open(os.devnull, "w") as null, redirect_stdout(null):
            return end_of(fork(act))

    copy_of(base, work)
    assert made(Harm("off")) == 0
    shutil.copy(work / where, base / where)
    with (base / where).open("ab") as file:
        file.write(b"former")
    copy_of(base, work)
    assert made(Harm(log=log)) == 0

    def act(harm: Harm) -> int:
        assert made(harm) == -9
        found = (copied := copy_of(work, directory / "seen") / where).read_bytes()
        if found != (base / where).read_bytes():
            assert why_wrong(copied.parent, checkpoint_index.manifest_of(copied.parents[1], 1)) == ""
        left = 1 if found.endswith(b"former") else 2
        assert made(Harm("off")) == 0
        check(work, [1])
        copy_of(base, work)
        return left

    copy_of(base, work)
    return for_each(harms(read_log(log)), act)


def arenas(directory: Path, on_disk: bool) -> Result:
    """A rank that fills its two arenas, which grow, and shrink, meanwhile."""
    work, log = directory / "arenas", directory / "log"
    assert save_to_arenas(work, Harm(log=log), on_disk)

    def act(harm: Harm) -> int:
        assert not save_to_arenas(work, harm, on_disk)
        return check_arenas(work)

    return for_each(harms(read_log(log)), act)


def recorded(directory: Path) -> Result:
    """Nobody is killed: what the shim sees."""
    log = directory / "log"
    assert save(directory / "work", [1, 2, 2, 3, 4, 5], [Harm(log=log)]) == ["committed"]
    return read_log(log), Counter()


SCENARIOS: dict[str, Callable[[Path], Result]] = {
    "recorded": recorded,
    "alone": alone,
    "by disk": by_disk,
    "first": first,
    "again": again,
    "rank 0": lambda directory: two(directory, 0),
    "rank 1": lambda directory: two(directory, 1),
    "saver": saver,
    "prune": prune,
    "saver alone": saver_alone,
    "orphan": orphan,
    "view": view,
    "arenas": lambda directory: arenas(directory, False),
    "arenas on disk": lambda directory: arenas(directory, True),
}


def main() -> None:
    directory = Path(sys.argv[2])
    (directory / "none").mkdir()
    calls, left = SCENARIOS[sys.argv[1]](directory)
    print(json.dumps({"calls": Counter(call.name for call in calls), "left": left}))


if __name__ == "__main__":
    main()
