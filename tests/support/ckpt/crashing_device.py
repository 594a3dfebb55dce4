"""A device's process with two more commands: one that ends it, and one that hangs."""

from __future__ import annotations

import os
import signal
import sys
import time

from resilio_hpc.ckpt.devices import device_process
from resilio_hpc.ckpt.devices.device_process import DeviceMemory, DeviceRequest
from tests.support.environments import ROOT


def crash(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    time.sleep(1000)


_PROGRAM = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.ckpt.crashing_device import main; main()"
COMMAND = (sys.executable, "-c", _PROGRAM)  # a test beside it may be in another directory


def main() -> None:
    device_process.OPERATIONS |= {"crash": crash, "hang": hang}
    device_process.main()
