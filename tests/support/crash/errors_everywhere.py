"""Let every single I/O call of a save fail, once or from then on, and see what becomes of it: run by test_io_errors.

argv: a scenario, the name of an errno, "once" or "on", a directory. Prints a JSON object: how often those who waited
were told what: "committed" all the same, or an error.
"""

from __future__ import annotations

import errno
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.core.errors import CheckpointError
from tests.support.crash.harm import Harm, arm, read_log, tried
from tests.support.crash.lives import (
    become,
    check,
    check_disk,
    check_nothing_is_left,
    copy_of,
    end_of,
    fork,
    is_state_of,
    save,
    state_of,
)

TRAINED = 7
"""Steps of training between two saves."""


def said_of(checkpointer: Checkpointer, step: int, rank: int = 0) -> str:
    """Save, train on, then wait: "committed", or what the handle says. ``save`` itself never raises."""
    handle = checkpointer.save(step, state_of(step, rank))
    assert sum(range(TRAINED)) == 21
    try:
        handle.wait(timeout_s=100)
    except CheckpointError as error:
        return str(error)
    return "committed"


def life(work: Path, harm: Harm) -> str:
    """A life whose save of step 2 meets the error, restores while it is gone, and saves step 3."""
    told = work.with_name("told")

    def rank() -> None:
        checkpointer = become(0, 1, work)
        arm(harm, work)
        said = said_of(checkpointer, 2)
        arm(Harm("off"))
        found = become(0, 1, work).restore()
        assert found is not None
        assert found[0] == 2 if said == "committed" else found[0] in (1, 2), (said, found[0])
        assert is_state_of(found[1], found[0])
        assert said_of(checkpointer, 3) == "committed"
        told.write_text(said)

    assert end_of(fork(rank)) == 0
    return told.read_text()


def alone(directory: Path, mode: str, error: int, former: int = 1) -> Counter[str]:
    """One process, with a step committed before."""
    base, work, log = directory / "base", directory / "work", directory / "log"
    assert save(base, [former], [None]) == ["committed"]
    assert life(copy_of(base, work), Harm(log=log)) == "committed"
    seen: Counter[str] = Counter()
    for call in tried(read_log(log)):
        try:
            said = life(copy_of(base, work), Harm(mode, call.number, error))
            check(work, [3])
            check_nothing_is_left(work)
        except AssertionError as failed:
            raise AssertionError(f"{mode} at {call}: {failed}") from failed
        seen[said.replace(str(work), "DIRECTORY")] += 1
    return seen


def prune(directory: Path, mode: str, error: int) -> Counter[str]:
    """One process, whose save makes four older steps go."""
    base, work, log, told = (directory / name for name in ("base", "work", "log", "told"))
    assert save(base, range(1, 7), [None], retention=Retention(9)) == ["committed"]
    seen: Counter[str] = Counter()

    def rank(harm: Harm) -> None:
        checkpointer = become(0, 1, copy_of(base, work), retention=Retention(1, keep_every=3))
        arm(harm, work)
        said = said_of(checkpointer, 7)
        arm(Harm("off"))
        assert {3, 6} <= set(checkpointer.steps())
        assert said_of(checkpointer, 8) == "committed"
        told.write_text(said)

    assert end_of(fork(lambda: rank(Harm(log=log)))) == 0
    for call in tried(read_log(log)):
        assert end_of(fork(lambda call=call: rank(Harm(mode, call.number, error)))) == 0, call
        check(work, [8])
        assert checkpoint_index.committed_steps(work) == [3, 6, 8], call
        check_nothing_is_left(work)
        seen[told.read_text().replace(str(work), "DIRECTORY")] += 1
    return seen


def disk(directory: Path, mode: str, error: int) -> Counter[str]:
    """The disk of the node by way of which a step is written: whatever it does, the step is committed."""
    work, local, log, told = (directory / name for name in ("work", "disk", "log", "told"))
    local.mkdir()
    assert save(work, [1], [None], local=local) == ["committed"]
    base, base_disk = copy_of(work, directory / "base"), copy_of(local, directory / "base disk")
    seen: Counter[str] = Counter()

    def rank(harm: Harm) -> None:
        copy_of(base, work)
        copy_of(base_disk, local)
        checkpointer = become(0, 1, work, local=local)
        arm(harm, local)
        said = said_of(checkpointer, 2)
        arm(Harm("off"))
        told.write_text(said)
        found = checkpointer.restore()
        assert found is not None
        assert found[0] == 2
        assert is_state_of(found[1], 2)
        assert said_of(checkpointer, 3) == "committed"

    assert end_of(fork(lambda: rank(Harm(log=log)))) == 0
    for call in tried(read_log(log)):
        assert end_of(fork(lambda call=call: rank(Harm(mode, call.number, error)))) == 0, call
        check(work, [3], local=local)
        check_nothing_is_left(work)
        check_disk(local, [1, 3], [2, 3])
        seen[told.read_text()] += 1
    return seen


def spill(directory: Path, mode: str, error: int) -> Counter[str]:
    """The disk of the node on which snapshots lie that do not fit into memory."""
    work, local, log, told = (directory / name for name in ("work", "local", "log", "told"))
    seen: Counter[str] = Counter()

    def rank(harm: Harm) -> None:
        become(0, 1, copy_of(directory / "none", work))
        copy_of(directory / "none", local)
        checkpointer = Checkpointer(work, local=local, memory=False)
        arm(harm, local)
        said = said_of(checkpointer, 2)
        arm(Harm("off"))
        assert said_of(checkpointer, 3) == "committed"
        told.write_text(said)

    assert end_of(fork(lambda: rank(Harm(log=log)))) == 0
    for call in tried(read_log(log)):
        assert end_of(fork(lambda call=call: rank(Harm(mode, call.number, error)))) == 0, call
        check(work, [3])
        seen[told.read_text().replace(str(local), "DIRECTORY")] += 1
    return seen


def two(directory: Path, mode: str, error: int) -> Counter[str]:
    """Two processes, of which rank 1 meets the error. What rank 0 says."""
    base, work, log = directory / "base", directory / "work", directory / "log"
    assert save(base, [1], [None, None]) == ["committed"] * 2
    assert save(copy_of(base, work), [2], [None, Harm(log=log)]) == ["committed"] * 2
    seen: Counter[str] = Counter()
    for call in tried(read_log(log)):
        told = save(copy_of(base, work), [2], [None, Harm(mode, call.number, error)], peers_timeout_s=2.0)
        left = check(work, [1, 2], 2)
        assert all(said == "committed" or "was not saved" in said for said in told), told
        assert left == 2 or "committed" not in told, told
        assert save(work, [3], [None, None]) == ["committed"] * 2
        check_nothing_is_left(work, 2)
        seen[told[0].replace(str(work), "DIRECTORY")] += 1
    return seen


SCENARIOS: dict[str, Callable[[Path, str, int], Counter[str]]] = {
    "alone": alone,
    "again": lambda directory, mode, error: alone(directory, mode, error, former=2),
    "prune": prune,
    "disk": disk,
    "spill": spill,
    "two": two,
}


def main() -> None:
    scenario, name, how, directory = sys.argv[1:]
    (Path(directory) / "none").mkdir()
    print(json.dumps(SCENARIOS[scenario](Path(directory), f"fail {how}", getattr(errno, name))))


if __name__ == "__main__":
    main()
