"""Why a GPU's clocks are held down: bits of NVML's nvmlClocksEventReasons (nvml.h).

Limits that belong to usual work, such as the power cap, are left out.
"""

from __future__ import annotations

from enum import IntFlag


class GpuThrottle(IntFlag):
    """A reason that does not belong to a GPU's usual work."""

    HARDWARE = 0x08  # nvmlClocksThrottleReasonHwSlowdown
    DRIVER_HEAT = 0x20  # SwThermalSlowdown
    HEAT = 0x40  # HwThermalSlowdown
    POWER_BRAKE = 0x80  # HwPowerBrakeSlowdown


BY_HARDWARE = {
    GpuThrottle.HARDWARE: "hardware slowdown",
    GpuThrottle.HEAT: "hardware thermal slowdown",
    GpuThrottle.POWER_BRAKE: "power brake",
}
"""What speaks of a fault. The driver holds clocks down for heat while a GPU still works as it is built to."""
ALL = int(GpuThrottle.HARDWARE | GpuThrottle.DRIVER_HEAT | GpuThrottle.HEAT | GpuThrottle.POWER_BRAKE)
WORDS = {
    GpuThrottle.DRIVER_HEAT | GpuThrottle.HEAT: "heat",
    GpuThrottle.POWER_BRAKE: "the power supply",
    GpuThrottle.HARDWARE: "the hardware",
}
