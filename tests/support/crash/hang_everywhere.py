"""Let the file system hang at every single I/O call of a save, while training goes on: run by test_hung_disk.

argv: a scenario, a directory. Prints a JSON object: how often the file system hung at each kind of call.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.ckpt.handle import SaveHandle
from tests.support.crash.harm import Call, Harm, arm, read_log, tried
from tests.support.crash.lives import (
    become,
    check,
    check_nothing_is_left,
    copy_of,
    end_of,
    end_of_life,
    fork,
    save,
    state_of,
)


def until(condition: Callable[[], object]) -> None:
    """Wait as long as it takes."""
    while not condition():
        time.sleep(0.002)


def is_blocked(log: Path) -> bool:
    """Has the shim stopped a call?"""
    return log.exists() and "\tblocked\t" in log.read_text()


def refused(handle: SaveHandle) -> bool:
    """Did it fail at once, in words for a user?"""
    return "still being written to" in handle.error and "training goes on" in handle.error


def alone(directory: Path, own_process: bool = False, **options: Path) -> Counter[str]:
    """Two saves come and go while the first one hangs, and when that is over all is as it should be. ``options``: a
    disk of the node, which may hang, too."""
    base, work, log, release = (directory / name for name in ("base", "work", "log", "release"))
    assert save(base, [1], [None]) == ["committed"]
    assert save(copy_of(base, work), [2], [Harm(log=log)], **options) == ["committed"]

    def life(number: int) -> None:
        checkpointer = become(0, 1, work, own_process, patience_s=0.01, **options)
        arm(Harm("hang", number, 0, log, release), work, *options.values())
        hung = checkpointer.save(2, state_of(2))
        until(lambda: is_blocked(log))
        assert refused(checkpointer.save(3, state_of(3)))
        assert refused(checkpointer.save(4, state_of(4)))
        assert not hung.done()
        assert not release.exists()
        release.touch()
        hung.wait(timeout_s=100)
        while refused(after := checkpointer.save(5, state_of(5))):
            pass  # it still tidies up
        after.wait(timeout_s=100)

    calls = tried(read_log(log))[:: 5 if own_process else 1]  # processes take their time to start
    for call in calls:
        copy_of(base, work)
        for disk in options.values():
            copy_of(directory / "none", disk)
        for path in (log, release):
            path.unlink(missing_ok=True)
        assert end_of_life(lambda call=call: life(call.number)) == 0, call
        check(work, [5])
        check_nothing_is_left(work)
    return Counter(call.name for call in calls)


def by_disk(directory: Path) -> Counter[str]:
    """By way of the node's own disk."""
    return alone(directory, local=copy_of(directory / "none", directory / "disk"))


def one_of_two(directory: Path) -> Counter[str]:
    """Rank 1 hangs, alone, when its part of step 2 is there. Rank 0 commits that, saves step 3, and waits for a part
    that rank 1 does not write any more. Both save step 4."""
    work, log, release, waits = (directory / name for name in ("work", "log", "release", "rank 0 waits"))

    def staged(step: int) -> list[Path]:
        return list(work.glob(f".staging-step-{step:010d}-*"))

    def second(harm: Harm) -> Callable[[], None]:
        def act() -> None:
            checkpointer = become(1, 2, work, patience_s=0.01)
            until(lambda: staged(2))
            arm(harm, work)
            hung = checkpointer.save(2, state_of(2, 1))
            if harm.mode == "hang":
                until(waits.exists)
                assert refused(checkpointer.save(3, state_of(3, 1)))
                release.touch()
            hung.wait(timeout_s=100)
            if harm.mode == "hang":
                checkpointer.save(4, state_of(4, 1)).wait(timeout_s=100)

        return act

    def first(harm: Harm) -> None:
        checkpointer = become(0, 2, work)
        checkpointer.save(2, state_of(2)).wait(timeout_s=100)
        if harm.mode == "hang":
            lonely = checkpointer.save(3, state_of(3))
            until(lambda: any((path / ".shard-0.json").exists() for path in staged(3)))
            waits.touch()
            checkpointer.save(4, state_of(4)).wait(timeout_s=100)
            assert "rank 1 went on without it" in lonely.error, lonely.error

    def both(harm: Harm) -> None:
        copy_of(directory / "none", work)
        ranks = [fork(lambda: first(harm)), fork(second(harm))]
        assert [end_of(rank) for rank in ranks] == [0, 0]

    assert end_of(fork(lambda: both(Harm(log=log)))) == 0
    last: Call = read_log(log)[-1]  # the sync of the note that rank 0 reads
    assert end_of(fork(lambda: both(Harm("hang", last.number, 0, None, release)))) == 0
    check(work, [4], 2)
    check_nothing_is_left(work, 2)
    return Counter([last.name])


SCENARIOS: dict[str, Callable[[Path], Counter[str]]] = {
    "alone": alone,
    "own process": lambda directory: alone(directory, True),
    "by disk": by_disk,
    "one of two": one_of_two,
}


def main() -> None:
    directory = Path(sys.argv[2])
    (directory / "none").mkdir()
    print(json.dumps(SCENARIOS[sys.argv[1]](directory)))


if __name__ == "__main__":
    main()
