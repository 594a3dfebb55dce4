"""The choice of the client for a process that asks Slurm again and again.

To start pyslurm and to compare it with the commands takes as long as some ten questions to the commands
(benchmarks/slurm_questions.py), so a command that asks once or twice uses these.
"""

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
    note: Callable[[str], None],
    *,
    installed: Callable[[], bool] = _installed,
    reader: Callable[[], PyslurmReader] = PyslurmReader,
) -> CommandClient:
    """Return pyslurm's client if it is installed and agrees with the commands, else that of the commands.

    ``note`` gets the reason where a pyslurm that is installed is not used; ``reader`` asks it. Errors of Slurm itself
    appear with the first question, not here.
    """
    if not installed():
        return CommandClient()
    try:
        client = PyslurmClient(reader())
        if client.agrees():
            return client
        why = "it tells other things than Slurm's commands: was it built for this Slurm?"
    except SlurmError as error:  # pyslurm without its Slurm, or no Slurm at all: the commands tell which
        why = str(error)
    note(f"pyslurm is not used, Slurm's commands are: {why}")
    return CommandClient()
