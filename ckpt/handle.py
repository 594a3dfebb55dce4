"""The result of ``Checkpointer.save``: the progress of that save; and why saves may take longer."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Literal

from typing_extensions import assert_never

from resilio_hpc.ckpt.coordination.coordinator import ROUND_OVER
from resilio_hpc.ckpt.coordination.turns import Turns
from resilio_hpc.core.errors import CheckpointError, SaveRefused, UsageError
from resilio_hpc.core.standard_streams import say
from resilio_hpc.core.tiers import Stage

StageName = Literal["memory", "local", "committed"]
_ORDER = (Stage.NONE, Stage.MEMORY, Stage.LOCAL, Stage.COMMITTED)


class SaveHandle:
    """Progress of one save: ``memory``, then ``local``, then ``committed``; or failed."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._reached = Stage.NONE
        self._error = ""
        self._refused = False
        self._changed = threading.Condition()
        self._turns = Turns("SaveHandle")

    @property
    def stage(self) -> Stage:
        """The last stage reached: "none", "memory", "local" or "committed"."""
        return self._reached

    @property
    def error(self) -> str:
        """Return why this save cannot go on; "" as long as it can."""
        return self._error

    def done(self, stage: StageName = "committed") -> bool:
        """Return whether the save has reached ``stage``."""
        return _has(self._reached, _stage(stage))

    def wait(self, stage: StageName = "committed", timeout_s: float | None = None) -> None:
        """Wait until the save has reached ``stage``.

        Raises CheckpointError when it never will (SaveRefused: the same save may be made again), TimeoutError after
        ``timeout_s`` seconds, UsageError in a forked child, which gets no news of it.
        """
        self._turns.check_process()
        wanted = _stage(stage)
        with self._changed:
            if not self._changed.wait_for(lambda: _has(self._reached, wanted) or self._error, timeout_s):
                raise TimeoutError(f"step {self.step} is not {stage} after {timeout_s:g} s")
            if not _has(self._reached, wanted):
                kind = SaveRefused if self._refused else CheckpointError
                raise kind(f"step {self.step} was not saved ({stage}): {self._error}")

    def reach(self, stage: Stage) -> None:
        """Record a stage, and those below it."""
        with self._changed:
            self._reached = max(self._reached, stage, key=_ORDER.index)
            self._changed.notify_all()

    def fail(self, error: str, *, refused: bool = False) -> None:
        """Record that the save cannot go on; ``refused``: it never began, and may be made again."""
        with self._changed:
            if not self._error:
                self._error, self._refused = error, refused
            self._changed.notify_all()


class OpenSaves:
    """The handles of saves that are whole in memory, until they are committed or have failed."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """Begin; ``warn``: called for a save that will not be committed."""
        self._warn = warn
        self._handles: dict[int, SaveHandle] = {}
        self._lock = threading.Lock()

    def add(self, handle: SaveHandle) -> None:
        """Add a save that has reached memory."""
        with self._lock:
            self._handles[handle.step] = handle
        handle.reach(Stage.MEMORY)

    def forget(self, handle: SaveHandle) -> None:
        """Drop a save."""
        with self._lock:
            self._handles.pop(handle.step, None)

    def all(self) -> list[SaveHandle]:
        """Return the handles of all open saves."""
        with self._lock:
            return list(self._handles.values())

    def reached(self, step: int, stage: Stage, error: str) -> None:
        """Pass on the progress of a save; step -1: of all saves."""
        with self._lock:
            match stage:
                case Stage.NONE | Stage.MEMORY:
                    pass  # the handle tells it
                case Stage.LOCAL:
                    if step in self._handles:
                        self._handles[step].reach(stage)
                case Stage.COMMITTED:
                    for older in [number for number in self._handles if number <= step]:
                        handle = self._handles.pop(older)
                        if older == step:
                            handle.reach(stage)
                        else:
                            handle.fail(f"superseded by step {step}, which is committed")
                case Stage.FAILED:
                    for failed in list(self._handles) if step < 0 else [step]:
                        if failed in self._handles:
                            if error != ROUND_OVER:
                                self._warn(f"step {failed} is not committed: {error}")
                            self._handles.pop(failed).fail(error)
                case _:
                    assert_never(stage)


def _has(reached: Stage, wanted: Stage) -> bool:
    return _ORDER.index(reached) >= _ORDER.index(wanted)


def _stage(name: StageName) -> Stage:
    if name not in _ORDER:
        raise UsageError(f"stage {name!r} is none of memory, local, committed")
    return Stage(name)


@functools.cache
def tell_why_slower(why: str) -> None:
    """Say once in a process that Python does the work of the C extensions."""
    say(
        f"no C extensions ({why}): checkpoints are the same, but saves and restores take longer."
        " Install a wheel for this platform, or install again where there is a C compiler"
    )
