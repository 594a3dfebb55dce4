"""The agent's ranks where ``--mpi`` asks for a PMI: as ``local_ranks``, but started through one srun step per round."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from resilio_hpc.launch import messages as m
from resilio_hpc.launch import spawner_messages as sm
from resilio_hpc.launch.local_ranks import LocalRanks
from resilio_hpc.launch.local_round import LocalRound
from resilio_hpc.launch.mpi_spawner import MpiSpawner
from resilio_hpc.launch.mpi_tasks import STEP_KILLED

if TYPE_CHECKING:
    from resilio_hpc.launch.agent import Agent

KILLED_WITH_STEP = "killed together with its MPI step"  # first_failure knows this for an echo
_TAIL_BYTES = 8192
# What MPI_Abort leaves on standard error: Open MPI 4 and 5, MPICH 3 and 4 (and those derived from it).
_ABORTED = (
    re.compile(r"MPI_ABORT was invoked on rank \d+ .*?\n?.*?with errorcode\s+(-?\d+)", re.DOTALL),
    re.compile(r"application called MPI_Abort\([^)]*?(-?\d+)\)"),
)


def local_ranks(agent: Agent, token: str, spool: Path) -> LocalRanks:
    """The ranks of an agent, in the way that its options ask for."""
    kind = MpiRanks if agent.settings.options.mpi else LocalRanks
    return kind(agent, token, spool)


class MpiRanks(LocalRanks):
    """Ranks that are tasks of a step."""

    imports_first = False
    _spawner: MpiSpawner

    def _new_spawner(self, environment: dict[str, str], directory: Path) -> MpiSpawner:
        return MpiSpawner(environment, directory)

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        """Lay out what the tasks of this node are to run; node rank 0 starts them all."""
        self._spawner.expect(local.number, local.member)
        super().spawn(local, start)
        if local.member.node_rank == 0:
            self._spawner.launch(self._agent.run.run_id, local.number, self._options.mpi, start.state.members)

    def tick(self) -> None:
        """Show the ranks' output; go on with a stop."""
        super().tick()
        self._take_events()

    def _end_in_words(self, event: sm.Exited) -> str:
        if event.exit_code != STEP_KILLED:
            return super()._end_in_words(event)
        code = abort_code(self._tail(event.local_rank))
        return KILLED_WITH_STEP if code is None else f"called MPI_Abort with error code {code}"

    def _tail(self, local_rank: int) -> str:
        path = self._error_logs.get(local_rank)
        if path is None:
            return ""
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                return file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""


def abort_code(text: str) -> int | None:
    """The error code of an MPI_Abort that the end of a rank's standard error tells of; None where there is none."""
    for pattern in _ABORTED:
        found = pattern.findall(text)
        if found:
            return int(found[-1])
    return None
