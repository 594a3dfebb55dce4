"""Ranks whose error is on record and whose processes have not ended: they save their state, or free their devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from resilio_hpc.launch.config.reentry_options import RestartPolicy
from resilio_hpc.launch.protocol.root_cause import reads_like_echo
from resilio_hpc.launch.workers.output.error_file import read_error
from resilio_hpc.launch.workers.rank_evidence import NO_EVIDENCE
from resilio_hpc.launch.workers.rank_owner import RankEvents


def tell_of_origin(
    core: RankEvents, error: str, living: Collection[int], files: Mapping[int, Path], policy: RestartPolicy
) -> None:
    """Report living ranks with an error of their own, where another rank's ``error`` reads like an echo of one.

    Else the echo would be taken for the failure that ended the round. ``files``: the error files by local rank. Where
    ranks start again alone, each one is reported once it has ended: its report lets the next process begin.
    """
    local = core.local
    if local is None or policy == "failed" or not reads_like_echo(error):
        return
    for local_rank in sorted(living):
        said, _ = read_error(files[local_rank]) if local_rank in files else (None, "")
        if said is not None and not reads_like_echo(said.message):
            core.ends.raised(local, local_rank, said.time, (said.message, said.traceback), NO_EVIDENCE)
