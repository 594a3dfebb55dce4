"""Record the I/O calls of whole saves, and when each was told to be committed: run by test_power_cut.

argv: a scenario, a directory. The log is its file ``log``; whoever is told makes a file ``told/STEP``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from tests.support.crash.agent_lives import arenas_of, persist_and_commit
from tests.support.crash.harm import Harm, arm
from tests.support.crash.lives import become, end_of, fork, state_of


def saves(directory: Path, steps: Sequence[int], world: int = 1) -> None:
    """Into a directory that is not there, below one that is not there either."""
    work, told = directory / "runs" / "work", directory / "told"

    def rank_of(rank: int) -> None:
        arm(Harm(log=directory / "log"), directory)
        checkpointer = become(rank, world, work)
        for step in steps:
            checkpointer.save(step, state_of(step, rank)).wait(timeout_s=100)
            (told / f"{step}").touch()

    ranks = [fork(lambda rank=rank: rank_of(rank)) for rank in range(world)]
    assert [end_of(rank) for rank in ranks] == [0] * world


def after_deaths(directory: Path) -> None:
    """The one before was killed while it made these directories, at each of the calls until the file is opened."""

    def life(work: Path, harm: Harm) -> None:
        arm(harm, directory)
        become(0, 1, work).save(2, state_of(2)).wait(timeout_s=100)

    log = directory / "log"
    for number in range(1, 8):
        work = directory / f"runs{number}" / "work"
        assert end_of(fork(lambda work=work, number=number: life(work, Harm("kill", number, log=log)))) == -9
        made = log.read_text().splitlines(keepends=True)[:-1]  # the last call was never made
        log.write_text("".join(made))
        assert end_of(fork(lambda work=work: life(work, Harm(log=log)))) == 0
    tell(directory, 2)


def saver(directory: Path) -> None:
    """The saver process of an agent, which makes the directory of the checkpoints for it."""
    work = directory / "runs" / "work"
    paths = arenas_of(directory / "arenas", 2)
    work.mkdir(parents=True)
    assert persist_and_commit(work, paths, 2, Harm(log=directory / "log"))
    tell(directory, 2)


def copy(directory: Path) -> None:
    """``resilio ckpt copy``."""
    work, archive = directory / "runs" / "work", directory / "runs" / "far" / "archive"
    saves(directory, [2])
    (directory / "log").unlink()

    def act() -> None:
        arm(Harm(log=directory / "log"), directory)
        assert resilio_ckpt(["copy", "--json", str(work), str(archive), "2"]) == 0

    assert end_of(fork(act)) == 0
    tell(directory, 2)


def tell(directory: Path, step: int) -> None:
    """At the end of the log."""

    def act() -> None:
        arm(Harm(log=directory / "log"), directory / "told")
        (directory / "told" / f"{step}").touch()

    assert end_of(fork(act)) == 0


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "alone": lambda directory: saves(directory, [2, 3]),
    "again": lambda directory: saves(directory, [2, 2]),
    "after deaths": after_deaths,
    "prune": lambda directory: saves(directory, [1, 2, 3, 4, 5, 6, 7]),
    "two": lambda directory: saves(directory, [2, 3], 2),
    "saver": saver,
    "copy": copy,
}


def main() -> None:
    directory = Path(sys.argv[2])
    (directory / "told").mkdir()
    SCENARIOS[sys.argv[1]](directory)
    print(json.dumps(None))


if __name__ == "__main__":
    main()
