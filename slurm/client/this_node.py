"""Slurm's name of this machine: its NodeName, which need not be its host name."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from resilio_hpc.core.errors import CommandError, SlurmError
from resilio_hpc.slurm.client.commands import TIMEOUT_S
from resilio_hpc.slurm.client.runner import Runner, run_here
from resilio_hpc.slurm.client.slurm_errors import refused

VARIABLE = "SLURMD_NODENAME"
"""slurmd sets it for all that it starts; a site sets it for a service of its own."""


def node_name(environment: Mapping[str, str] = os.environ, host: str = "", run: Runner = run_here) -> str:
    """Return ``SLURMD_NODENAME``, else the NodeName of the one node whose NodeHostName is ``host``.

    ``host``: by default this one. Raises SlurmError, which names the question, where Slurm does not answer or knows
    none or several such nodes.
    """
    if environment.get(VARIABLE):
        return environment[VARIABLE]
    name = host or socket.gethostname()
    try:
        told = run(["sinfo", "-a", "-h", "-N", "-O", "NodeList:|,NodeHost:|"], TIMEOUT_S, {}).stdout
    except CommandError as error:
        raise refused(error) from error
    found = nodes_on(told, name)
    if len(found) != 1:
        knows = f"the nodes {', '.join(found)}" if found else "no node"
        raise SlurmError(f"Slurm knows {knows} with NodeHostName {name}: set {VARIABLE} to this machine's NodeName")
    return found[0]


def name_or_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the same, or the short host name where Slurm does not tell."""
    try:
        return node_name(environment)
    except SlurmError:
        return socket.gethostname().partition(".")[0]


def nodes_on(told: str, host: str) -> list[str]:
    """Return the nodes of lines ``gpu1|host1.example.org|`` that are on a host; either may lack its domain. Pure."""
    rows = [line.split("|") for line in told.splitlines()]
    whole = {row[0] for row in rows if len(row) >= 2 and row[1].lower() == host.lower()}
    short = {row[0] for row in rows if len(row) >= 2 and _short(row[1]) == _short(host)}
    return sorted(whole or short)


def _short(host: str) -> str:
    return host.lower().partition(".")[0]
