"""When a node goes on without some of its GPUs: part of a run's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from resilio_hpc.launch.config.flags import failures_flag, whole_number

EvictDevices = Literal["off", "observe", "on"]


@dataclass(frozen=True)
class DeviceOptions:
    """``min_devices`` and ``device_unit`` are the rules of ``launch/agent/device_eviction``."""

    evict_devices: EvictDevices = failures_flag(
        "look at a node's GPUs before ranks are (re)started; on: bad ones are hidden from ranks, and the node goes on "
        "with fewer, or a spare takes its place; observe: only say so (default: off)",
        "off",
        choices=get_args(EvictDevices),
    )
    min_devices: int = failures_flag(
        "with --evict-devices: a node with fewer GPUs left takes no part (default: 1)",
        1,
        whole_number,
        metavar="N",
        least=1,
    )
    device_unit: int = failures_flag(
        "with --evict-devices: a node runs a multiple of N ranks, as groups of N GPUs need (default: 1)",
        1,
        whole_number,
        metavar="N",
        least=1,
    )
