"""How each rank of a round is started: its command, environment, CPUs, and the files of its output."""

from __future__ import annotations

import os
from pathlib import Path

from resilio_hpc.ckpt.coordination.coordinator import ARRIVING
from resilio_hpc.launch.config import slurm_variables
from resilio_hpc.launch.config.slurm_variables import SlurmTask
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand
from resilio_hpc.launch.workers.node_context import NodeContext
from resilio_hpc.launch.workers.rank_env import RankPlacement, RoundSetting, cpu_share, rank_argv, rank_variables
from resilio_hpc.launch.workers.rank_owner import Surroundings


class RankCommands:
    """The commands of one node's ranks. ``base``: the spawner's environment, which ranks inherit."""

    def __init__(
        self, node: NodeContext, around: Surroundings, base: dict[str, str], agent_socket: Path, begun: Path
    ) -> None:
        """Take the node's parts. ``begun``: the file with the step that is being read ahead."""
        self._node = node
        self._options = node.options
        self._around = around
        self._base = base
        self._agent_socket = agent_socket
        self._begun = begun
        self._in_own_step = slurm_variables.SET_ASIDE in os.environ

    def log_paths(self, directory: Path, rank: int) -> tuple[Path, Path]:
        """Return the files of a rank's standard output and error; they may be the same."""
        output = self._options.output
        separate = any((
            output.redirects != "0", output.tee != "0", output.duplicate_stdout_filters,
            output.duplicate_stderr_filters,
        ))  # fmt: skip
        return directory / f"{rank}.log", directory / (f"{rank}.err.log" if separate else f"{rank}.log")

    def of(self, placement: RankPlacement, start: m.Start, out: Path, err: Path, error: Path) -> RankCommand:
        """Return the command of one rank. ``error``: its error file.

        Raises UsageError where the options allow no such world.
        """
        node = self._node
        restore = start.restore_of(placement.rank)
        gpu = self._options.planning.plan.gpu_among([member.node for member in start.state.members])
        setting = RoundSetting(
            node.run.run_id, node.run.path, start.state.round, start.state.epoch, start.state.restarts,
            start.master_address, start.master_port, self._agent_socket, node.arena_dir,
            f"{ARRIVING if start.arrives(placement.rank) else restore.source}:{restore.step}" if restore else "",
            self._begun, start.collective_s, gpu,
        )  # fmt: skip
        local = placement.local_rank
        around = self._around.variables
        variables = around | rank_variables(self._base | around, self._options, placement, setting, error)
        if self._in_own_step:
            task = SlurmTask(
                placement.node_rank, local, placement.rank, placement.local_world_size, placement.world_size
            )
            variables |= slurm_variables.of_task(self._base, start.state.members, task)
        cpus = None
        if self._options.cpu_bind == "ranks":
            cpus = cpu_share(sorted(os.sched_getaffinity(0)), local, placement.local_world_size)
        return RankCommand(
            local, rank_argv(self._options, local, placement, gpu), self._options.kind, variables,
            node.settings.cwd or str(Path.cwd()), str(out), str(err), cpus, node.open_files,
            str(node.run.path / run_directory.STDIN) if placement.rank == self._options.stdin_rank else "",
        )  # fmt: skip
