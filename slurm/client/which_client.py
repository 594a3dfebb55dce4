"""The choice of the best client that works here."""

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
    """Return pyslurm's client if it is installed and agrees with the commands, else that of the commands.

    ``installed``: whether there is a pyslurm, which ``reader`` then asks. Errors of Slurm itself appear with the first
    question, not here.
    """
    if installed():
        try:
            client = PyslurmClient(reader())
            if client.agrees():
                return client
        except SlurmError:  # pyslurm without its Slurm, or no Slurm at all: the commands tell which
            return CommandClient()
    return CommandClient()
