"""The agent's ranks under ``--mpi``: like ``local_ranks``, but started through one srun step per round."""

from __future__ import annotations

import re
import time
from pathlib import Path

from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.forking import spawner_messages as sm
from resilio_hpc.launch.workers.local_ranks import LocalRanks
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.mpi.spawner import MpiSpawner
from resilio_hpc.launch.workers.mpi.tasks import STEP_KILLED
from resilio_hpc.launch.workers.node_context import NodeContext
from resilio_hpc.launch.workers.rank_owner import RankEvents, StopHow, Surroundings

KILLED_WITH_STEP = "killed together with its MPI step"  # first_failure takes a failure with this text as a consequence
ECHO_S = 0.3  # a consequence is reported so much later than it is seen; by then its cause is known, on any node
_TAIL_BYTES = 8192
# What MPI_Abort prints on standard error: Open MPI 4 and 5, MPICH 3 and 4 and their derivatives.
_ABORTED = (
    re.compile(r"MPI_ABORT was invoked on rank \d+ .*?\n?.*?with errorcode\s+(-?\d+)", re.DOTALL),
    re.compile(r"application called MPI_Abort\([^)]*?(-?\d+)\)"),
)


def local_ranks(
    node: NodeContext, core: RankEvents, around: Surroundings, begun: Path, token: str, spool: Path
) -> LocalRanks:
    """Return the agent's ranks, of the kind that its options ask for."""
    kind = MpiRanks if node.options.mpi else LocalRanks
    return kind(node, core, around, begun, token, spool)


class MpiRanks(LocalRanks):
    """Ranks that are tasks of a step."""

    imports_first = False
    _spawner: MpiSpawner

    def __init__(
        self, node: NodeContext, core: RankEvents, around: Surroundings, begun: Path, token: str, spool: Path,
        echo_s: float = ECHO_S,
    ) -> None:  # fmt: skip
        """Take the node's parts; ``echo_s``: how long a consequence waits for the failure that caused it."""
        super().__init__(node, core, around, begun, token, spool)
        self._echo_s = echo_s
        self._echoes: list[tuple[float, sm.Exited]] = []  # when to report each

    def _new_spawner(self, environment: dict[str, str], directory: Path) -> MpiSpawner:
        return MpiSpawner(environment, directory)

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        """Prepare the commands for the tasks of this node; node rank 0 starts all tasks."""
        self._echoes.clear()
        self._spawner.expect(local.number, local.member)
        super().spawn(local, start)
        if local.member.node_rank == 0:
            self._spawner.launch(self._node.run.run_id, local.number, self._options.mpi, start.state.members)

    def stop(self, how: StopHow, keep_stores_from: int) -> None:
        """End all ranks."""
        self._echoes.clear()
        super().stop(how, keep_stores_from)

    def tick(self) -> None:
        """Show the ranks' output, go on with a stop, and report consequences that no other failure explained."""
        super().tick()
        self._take_events()
        now = time.monotonic()
        while self._echoes and now >= self._echoes[0][0]:
            super()._on_exited(self._echoes.pop(0)[1])

    def _on_exited(self, event: sm.Exited) -> None:
        if self._end_in_words(event) == KILLED_WITH_STEP:
            self._echoes.append((time.monotonic() + self._echo_s, event))
        else:
            super()._on_exited(event)

    def _end_in_words(self, event: sm.Exited) -> str:
        if event.exit_code != STEP_KILLED:
            return super()._end_in_words(event)
        code = abort_code(self._tail(event.local_rank))
        return KILLED_WITH_STEP if code is None else f"called MPI_Abort with error code {code}"

    def _tail(self, local_rank: int) -> str:
        path = self._files.error_logs.get(local_rank)
        if path is None:
            return ""
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                return file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""


def abort_code(text: str) -> int | None:
    """Return the error code of an MPI_Abort that the end of a rank's standard error reports; None without one.

    None where there is none.
    """
    for pattern in _ABORTED:
        found = pattern.findall(text)
        if found:
            return int(found[-1])
    return None
