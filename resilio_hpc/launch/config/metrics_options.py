"""What is sampled on the nodes, and where it can be read: part of a run's options."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.launch.config.flags import number, run_flag, whole_number

DEFAULT_INTERVAL_S = 10.0
DEFAULT_ADDRESS = "127.0.0.1"
HIGHEST_PORT = 65535


@dataclass(frozen=True)
class MetricsOptions:
    """``gpu_headroom_gb``: None, where it follows from the GPU's memory (``metrics/memory_watch``)."""

    interval_s: float = run_flag(
        "seconds between two samples of a node's and its ranks' memory, devices and counters; 0: none, and no memory "
        "warnings (default: 10)",
        DEFAULT_INTERVAL_S,
        number,
        metavar="S",
        least=0,
        names="--metrics-interval",
    )
    port: int | None = run_flag(
        "serve the samples to Prometheus at this port of each node; 0: any free one, which resilio metrics shows "
        "(default: no endpoint)",
        None,
        whole_number,
        metavar="PORT",
        least=0,
        names="--metrics-port",
    )
    address: str = run_flag(
        "with --metrics-port: the address to listen at; one that other machines reach asks for the run's token, "
        "which resilio metrics has (default: 127.0.0.1)",
        DEFAULT_ADDRESS,
        metavar="ADDRESS",
        names="--metrics-address",
    )
    textfile: str = run_flag(
        "write the samples to DIR of each node, for node_exporter's textfile collector; the file is removed at the end",
        "",
        raw=None,
        reads=lambda given: str(Path(given).absolute()) if given else "",
        metavar="DIR",
        names="--metrics-textfile",
    )
    gpu_headroom_gb: float | None = run_flag(
        "warn where a GPU has less than GB of its memory free; 0: never (default: a twentieth, so 4 of 80)",
        None,
        number,
        metavar="GB",
        least=0,
        names="--gpu-headroom",
    )

    @property
    def exposed(self) -> bool:
        """Return whether Prometheus is to read the samples."""
        return self.port is not None or bool(self.textfile)

    @property
    def asks_for_token(self) -> bool:
        """Return whether other machines may reach the endpoint."""
        try:
            return not ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return self.address != "localhost"
