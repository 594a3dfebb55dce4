"""Which device a tensor is on: the CPU, CUDA, and those that other packages register by torch's device type.

A package registers by an entry point of the group ``resilio_hpc.devices``: its name is torch's device type, its value a
function, or a class, that returns the ``Device``. It is imported when the first tensor of that type is met.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from resilio_hpc.ckpt.devices.cpu import Cpu
from resilio_hpc.ckpt.devices.cuda import Cuda
from resilio_hpc.ckpt.devices.interface import CopiesOut, Device, Mark
from resilio_hpc.core.errors import LayoutMismatch
from resilio_hpc.core.standard_streams import say

GROUP = "resilio_hpc.devices"
NEEDED = sorted({name for kind in (CopiesOut, Device) for name in vars(kind) if not name.startswith("_")})
"""What an implementation has."""


@cache
def _registered() -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


class DeviceRegistry:
    """``CopiesOut`` for tensors of all devices but the CPU, and all devices by their kinds."""

    def __init__(self, registered: Callable[[], Mapping[str, EntryPoint]] = _registered) -> None:
        """Know the CPU and CUDA. ``registered``: the entry points by torch's device type."""
        self._registered = registered
        self._devices: dict[str, Device | None] = {"cpu": Cpu(), "cuda": Cuda(), "meta": None, "": None}

    def add(self, device: Device) -> None:
        """Use this device for its kind from here on. Raises TypeError for one that lacks something."""
        missing = [name for name in NEEDED if not hasattr(device, name)]
        if missing:
            raise TypeError(f"it lacks {', '.join(missing)}")
        self._devices[device.kind] = device

    def of_kind(self, kind: str) -> Device | None:
        """Return the device of one of torch's types; None: torch's own copies serve for its tensors."""
        if kind not in self._devices:
            self._devices[kind] = None
            self._load(kind)
        return self._devices[kind]

    def of(self, value: Any) -> Device | None:
        """Return the device that has a tensor; None for a numpy array, and for a type without one."""
        return self.of_kind(getattr(getattr(value, "device", None), "type", ""))

    def in_use(self) -> list[Device]:
        """Return the CPU, CUDA, and all others that were met in this process."""
        torch = sys.modules.get("torch")
        current = None if torch is None else torch.accelerator.current_accelerator()
        if current is not None:
            self.of_kind(current.type)
        return [device for device in self._devices.values() if device is not None]

    def _load(self, kind: str) -> None:
        entry = self._registered().get(kind)
        if entry is None:
            return
        try:
            self.add(entry.load()())
            if self._devices[kind] is None:
                raise TypeError("it is of another kind")
        except Exception as error:  # noqa: BLE001 - another package's code; torch's own copies are slower, and right
            say(
                f"the device {kind!r} of {entry.value} cannot be used, so its tensors are copied by torch: "
                f"{type(error).__name__}: {error}"
            )

    # -- generators and errors -------------------------------------------------------------------------------------

    def rng_states(self) -> dict[str, Any]:
        """Return the states of the generators in use, by kind."""
        found = {device.kind: device.rng_state() for device in self.in_use()}
        return {kind: state for kind, state in found.items() if state is not None}

    def set_rng_states(self, states: Mapping[str, Any]) -> None:
        """Set generators. Raises LayoutMismatch for those of a device that is not here."""
        for kind, state in states.items():
            device = self.of_kind(kind)
            if device is None:
                raise LayoutMismatch(
                    f"generators of a device {kind!r} were saved; here no package registers one ({GROUP})"
                )
            device.set_rng_state(state)

    def ends_process(self, error: BaseException) -> bool:
        """Return whether, after this error, this process cannot go on with a device, however it is brought back."""
        return any(device.loses_state(error) and not device.rebuilds for device in self.in_use())

    def rebuild(self) -> None:
        """Bring back what devices have lost. Raises DeviceLost."""
        for device in self.in_use():
            device.rebuild()

    # -- CopiesOut -------------------------------------------------------------------------------------------------

    @property
    def refusal(self) -> str:
        """See CopiesOut."""
        return "; ".join(device.refusal for device in self._accelerators() if device.refusal)

    def place(self, value: Any) -> Any:
        """See CopiesOut."""
        device = self.of(value)
        return None if device is None or device.kind == "cpu" else device.place(value)

    def follow(self, where: Any) -> None:
        """See CopiesOut."""
        self._at(where).follow(where)

    def copy(self, part: Any, target: memoryview) -> None:
        """See CopiesOut."""
        self._at(part.device).copy(part, target)

    def mark(self, where: Any) -> Mark:
        """See CopiesOut."""
        return self._at(where).mark(where)

    def hold(self, where: Any, mark: Mark) -> None:
        """See CopiesOut."""
        self._at(where).hold(where, mark)

    def boundary(self, where: Any) -> Any:
        """See CopiesOut."""
        return self._at(where).boundary(where)

    @contextlib.contextmanager
    def beside(self, boundaries: Mapping[Any, Any]) -> Iterator[None]:
        """See CopiesOut."""
        kinds = dict.fromkeys(where.type for where in boundaries)
        with contextlib.ExitStack() as inside:
            for kind in kinds:
                own = {where: boundary for where, boundary in boundaries.items() if where.type == kind}
                inside.enter_context(self._at(next(iter(own))).beside(own))
            yield

    def lock_pages(self, memory: memoryview) -> Callable[[], None] | None:
        """See CopiesOut."""
        found = [device.lock_pages(memory) for device in self._accelerators()]
        unlock = [one for one in found if one is not None]
        if not unlock:
            return None

        def unlock_all() -> None:
            for one in unlock:
                one()

        return unlock_all

    def free_bytes(self, where: Any) -> int | None:
        """Return how much memory is free on a device; None: unknown."""
        return self._at(where).free_bytes(where)

    def _at(self, where: Any) -> Device:
        device = self.of_kind(where.type)
        assert device is not None
        return device

    def _accelerators(self) -> list[Device]:
        return [device for kind, device in self._devices.items() if device is not None and kind != "cpu"]


DEVICES = DeviceRegistry()
"""One for a process."""
