"""How one rank of a round is started again: the command of its first process, with the count of its restarts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand
from resilio_hpc.launch.workers.rank_env import RESTARTS_VARIABLE

_COUNT = "TORCHELASTIC_RESTART_COUNT"


class LoneRestarts:
    """Which ranks are being started again, and after which processes."""

    def __init__(self) -> None:
        self._commands: dict[int, RankCommand] = {}
        self._ended: dict[int, int] = {}
        self._starting: set[int] = set()

    def begin(self, commands: Sequence[RankCommand]) -> None:
        """Take note that all ranks of another round are started, by these commands."""
        self._commands = {command.local_rank: command for command in commands}
        self._ended.clear()
        self._starting.clear()

    def ended(self, local_rank: int, pid: int) -> None:
        """Take note of the end of a rank's process."""
        self._ended[local_rank] = pid
        self._starting.discard(local_rank)

    def again(self, local_rank: int, restarts: int) -> RankCommand:
        """Return the command that starts a rank again. torch's count of restarts grows with the rank's own."""
        first = self._commands[local_rank]
        count = int(first.env.get(_COUNT, "0")) + restarts
        self._starting.add(local_rank)
        variables = {**first.env, _COUNT: str(count), RESTARTS_VARIABLE: str(restarts)}
        return msgspec.structs.replace(first, env=variables, after=self._ended.get(local_rank, 0))

    def started(self, local_rank: int) -> bool:
        """Return whether a process that has started is one of these."""
        found = local_rank in self._starting
        self._starting.discard(local_rank)
        return found
