"""What the checkpoint engine and ranks that go on in their process need of a kind of devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

LOGGED = "logged tensors"
"""In a path of a state: tensors of devices that are rebuilt by a log, other ones on each rank."""


class Mark(Protocol):
    """A point in a device's stream of copies."""

    def wait(self) -> None:
        """Return when all copies before it are complete. Raises RuntimeError where the device failed."""
        ...


class CopiesOut(Protocol):
    """Copies from devices, for snapshots; ``where`` is a result of ``place``.

    Only ``Mark.wait`` waits for the device. A device that fails raises RuntimeError, as torch does.
    """

    @property
    def refusal(self) -> str:
        """Return why memory cannot be page-locked; "": it can, as far as is known."""
        ...

    def place(self, value: Any) -> Any:
        """Return on which device this tensor is; None: on none of this kind."""
        ...

    def follow(self, where: Any) -> None:
        """Let later copies see the results of the current stream's work so far."""
        ...

    def copy(self, part: Any, target: memoryview) -> None:
        """Begin to copy a tensor, or a part of one, in row-major order."""
        ...

    def mark(self, where: Any) -> Mark:
        """Return a mark after all copies so far."""
        ...

    def hold(self, where: Any, mark: Mark) -> None:
        """Let later work of the current stream wait for ``mark``."""
        ...

    def boundary(self, where: Any) -> Any:
        """Return the end of the current stream's work so far, for ``beside``."""
        ...

    def beside(self, boundaries: Mapping[Any, Any]) -> contextlib.AbstractContextManager[None]:
        """Let this thread's copies follow what came before these ``boundary``, by device, and nothing that came later.

        A collective that waits for a lost rank never ends.
        """
        ...

    def free_bytes(self, where: Any) -> int | None:
        """Return how much memory can still be allocated there; None: unknown."""
        ...

    def lock_pages(self, memory: memoryview) -> Callable[[], None] | None:
        """Lock the pages, so that the device writes straight into them.

        Return what unlocks them, before they are unmapped.

        None: there is no device in use, or it refuses: then copies take longer, and the host waits for them.
        """
        ...


class Device(CopiesOut, Protocol):
    """A kind of devices: one object for a process."""

    @property
    def kind(self) -> str:
        """Return torch's device type."""
        ...

    @property
    def classes(self) -> tuple[type, ...]:
        """Return classes of its tensors, besides torch's own."""
        ...

    @property
    def rebuilds(self) -> bool:
        """Return whether ``rebuild`` brings a lost state back in this process."""
        ...

    def copy_in(self, target: Any, source: Any) -> None:
        """Assign ``source``, a tensor of the CPU or of this kind, to the elements of ``target``; it may go on later."""
        ...

    def synchronize(self, where: Any, timeout_s: float) -> bool:
        """Wait until all work so far is complete; return False where it is not, after ``timeout_s``."""
        ...

    def rng_state(self) -> Any:
        """Return the generators' state as plain values (bytes, lists); None: none is in use."""
        ...

    def set_rng_state(self, state: Any) -> None:
        """Set the generators. Raises LayoutMismatch where they are of more devices than there are."""
        ...

    def is_rebuilt(self, value: Any) -> bool:
        """Return whether the state's object that holds this tensor recognises another rank's content, and replaces it.

        A lost rank's snapshot may then have another rank's content for it.
        """
        ...

    def loses_state(self, error: BaseException) -> bool:
        """Return whether, after this error, what this process had on the device is gone or cannot be reached."""
        ...

    def rebuild(self) -> None:
        """Bring back what was lost; return at once where nothing was. Raises DeviceLost."""
        ...
