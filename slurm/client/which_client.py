"""The best client that works here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.pyslurm_client import PyslurmClient
from resilio_hpc.slurm.client.pyslurm_reader import PyslurmReader


def _installed() -> bool:
    return importlib.util.find_spec("pyslurm") is not None


def which(
    *,
    installed: Callable[[], bool] = _installed,
    reader: Callable[[], PyslurmReader] = PyslurmReader,
) -> CommandClient:
    """pyslurm's where it is installed and says the same as the commands, else that of the commands.

    ``installed`` says whether there is a pyslurm, which ``reader`` then asks.
    What is wrong with Slurm is told by the first question, not here.
    """
    if installed():
        try:
            client = PyslurmClient(reader())
            if client.agrees():
                return client
        except SlurmError:  # pyslurm without its Slurm, or no Slurm at all: the commands say which
            return CommandClient()
    return CommandClient()
