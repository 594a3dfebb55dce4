"""The files of one node's ranks in the present round: their output, their errors, their stacks."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.output.console import RankLogs
from resilio_hpc.launch.workers.rank_env import stack_file
from resilio_hpc.launch.workers.rank_notes import end_file


class RankFiles:
    """The files by local rank: ``errors`` and ``error_logs``, the files of standard error. ``directory``: of the logs.

    ``stacks``: where ranks write theirs; ``kept``: where these go when the round is over.
    """

    def __init__(self, logs: Path, errors: Path) -> None:
        """Take the directories for all rounds."""
        self._logs, self._errors = logs, errors
        self._last = errors
        self.directory = logs
        self.errors: dict[int, Path] = {}
        self.error_logs: dict[int, Path] = {}
        self.stacks: dict[int, Path] = {}
        self.kept: dict[int, Path] = {}

    def begin(self, local: LocalRound, paths: Callable[[Path, int], tuple[Path, Path]]) -> list[RankLogs]:
        """Make the directories of a round. ``paths``: directory, rank → standard output and error.

        Return the logs, in the order of the local ranks.
        """
        self.directory = self._logs / str(local.number) / local.node
        errors = self._errors / str(local.number)
        self.directory.mkdir(parents=True, exist_ok=True)
        errors.mkdir(parents=True, exist_ok=True)
        for older in self._errors.iterdir():
            if older not in (errors, self._last):  # stacks of the last round may still be read
                shutil.rmtree(older, ignore_errors=True)
        self._last = errors
        logs = []
        for number, rank in local.ranks.items():
            out, err = paths(self.directory, rank.rank)
            error = self.errors[number] = errors / f"{number}.json"
            self.error_logs[number] = err
            logs.append(RankLogs(rank.rank, number, out, err, error))
        self.stacks = {number: stack_file(self.errors[number]) for number in local.ranks}
        self.kept = {number: self.directory / f"{rank.rank}.stacks" for number, rank in local.ranks.items()}
        return logs

    def drop_error(self, local_rank: int) -> None:
        """Remove the error file of a rank's process that has ended: the next one may leave none."""
        for path in (self.errors[local_rank], end_file(self.errors[local_rank])):
            with contextlib.suppress(OSError):
                path.unlink()
