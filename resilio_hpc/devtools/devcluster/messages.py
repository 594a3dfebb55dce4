"""Messages between the commands and the rack over the control socket."""

from __future__ import annotations

from typing import Literal

import msgspec


class Request(msgspec.Struct, frozen=True):
    """A request; ``machine`` is empty for ``status`` and ``stop``."""

    action: Literal["status", "stop", "boot", "crash", "partition", "split", "heal"]
    machine: str = ""


class MachineState(msgspec.Struct, frozen=True, kw_only=True):
    """A machine in the rack's view: ``state``: off, booting, up or failed (``detail`` says why).

    ``link_up``: false when its cable is out, and when it is split from the others.
    """

    name: str
    state: str
    detail: str
    boots: int
    link_up: bool
    address: str
    pid_namespace: int


class Reply(msgspec.Struct, frozen=True):
    """The machines after the request, or why it was refused."""

    error: str = ""
    machines: list[MachineState] = []


class MachineStatus(MachineState, frozen=True, kw_only=True):
    """A machine with slurmctld's answer about it (empty for ``ctl`` and when slurmctld does not answer)."""

    slurm_state: str


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``resilio devcluster status --json``."""

    name: str
    slurm: str
    slurm_version: str
    shared: str
    problem: str
    machines: list[MachineStatus]
