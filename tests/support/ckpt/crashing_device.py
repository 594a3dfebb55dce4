"""A device's process with two more commands: one that ends it, and one that hangs."""

from __future__ import annotations

import os
import signal
import sys
import time

from resilio_hpc.ckpt.devices import device_process
from resilio_hpc.ckpt.devices.device_process import DeviceMemory, DeviceRequest


def crash(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    time.sleep(1000)


COMMAND = (sys.executable, "-c", "from tests.support.ckpt.crashing_device import main; main()")


def main() -> None:
    device_process.OPERATIONS |= {"crash": crash, "hang": hang}
    device_process.main()
