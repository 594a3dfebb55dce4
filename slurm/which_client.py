"""The best client that works here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.slurm.command_client import CommandClient
from resilio_hpc.slurm.pyslurm_client import PyslurmClient
from resilio_hpc.slurm.pyslurm_reader import PyslurmReader


def which(dry_run: Callable[[Sequence[str]], None] | None = None) -> CommandClient:
    """pyslurm's where it is installed and says the same as the commands, else that of the commands.

    What is wrong with Slurm is told by the first question, not here.
    """
    if importlib.util.find_spec("pyslurm") is not None:
        try:
            client = PyslurmClient(PyslurmReader(), dry_run=dry_run)
            if client.agrees():
                return client
        except SlurmError:  # pyslurm without its Slurm, or no Slurm at all: the commands say which
            return CommandClient(dry_run=dry_run)
    return CommandClient(dry_run=dry_run)
