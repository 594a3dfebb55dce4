"""Saves of one state: at the steps that are asked for, and of the last finished step when ranks cannot go on."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.ckpt.format.manifest import REPLICATED, Layout
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.handle import SaveHandle
from resilio_hpc.ckpt.snapshot.boundary_record import RecordWriter
from resilio_hpc.ckpt.state.first_gradient import FirstGradient
from resilio_hpc.ckpt.state.held_state import HeldState, NotHeld
from resilio_hpc.ckpt.state.overlap import fence_before_steps
from resilio_hpc.ckpt.state.own_part import own_part
from resilio_hpc.ckpt.state.parts_held import WHOLE, PartsHeld
from resilio_hpc.ckpt.state.put_back import put_back
from resilio_hpc.ckpt.state.tree import has_state
from resilio_hpc.ckpt.state.watched import Watched
from resilio_hpc.core.errors import CheckpointError, ResilioError
from resilio_hpc.core.standard_streams import say
from resilio_hpc.core.tiers import Tier

IN_STEP_S = 1.0
MOST_IN_STEP_S = 25.0
"""For how long a save waits for a rank that has begun its optimizer's step: no shorter, and no longer.

What follows up to the boundary waits for no other rank as a rule, and takes no longer than a whole step.
"""
_AS_LONG = 1.25  # times the step before
_LOOK_S = 0.005
_IN_STEP = "an optimizer's step had begun"


class SavesStates(Protocol):
    """Takes snapshots of states: the Checkpointer."""

    layout: Layout

    @property
    def place(self) -> Place:
        """Return the place of this process."""

    def save(self, step: int, state: Any) -> SaveHandle:
        """Take a snapshot, to be committed."""

    def mark_boundary(self, held: HeldState) -> None:
        """Note what devices have done before."""

    def save_held(self, held: HeldState) -> None:
        """Take a snapshot, and tell no other process. Raises CheckpointError, OSError."""

    def record_writer(self) -> RecordWriter | None:
        """Return where this rank records its boundaries; None without the launcher."""


class PutBack(NamedTuple):
    """A state that was brought back where it is, after ``step`` steps. ``part``: what other ranks do not have of it."""

    state: Any
    step: int
    part: bytes


class StateSaver:
    """Saves a state: ``saver(step)``. ``Checkpointer.saver`` makes it.

    ``replicated``: all ranks have the same tensors. ``run.steps`` holds the state at each boundary (``hold``), which
    copies only what is small. Where the ranks cannot go on, ``save_held`` saves it, from any thread, unless the next
    optimizer's step has begun.
    """

    def __init__(self, checkpoint: SavesStates, state: Any, group: str = "") -> None:
        """``state``: what is saved, or a function that returns it and changes nothing.

        ``group``: the ranks with the same tensors, by the script.
        """
        self._checkpoint = checkpoint
        self._round = checkpoint.place.round
        self.replicated = checkpoint.layout == REPLICATED
        self._parts: PartsHeld | None = WHOLE if self.replicated else None  # None: no other rank is known to have them
        self._group = group
        self._parts_of: Watched | None = None  # for which that was looked for
        is_function = callable(state) and not has_state(state)  # a module can be called, too
        self._state: Callable[[], Any] = state if is_function else lambda: state
        self._held: HeldState | None = None
        self._why_not = "no step has begun"
        self._lock = threading.Lock()
        self._records: RecordWriter | None = None
        self._is_opened = False  # whether it was looked for
        self._watched: Watched | None = None
        self._trainer = -1  # the thread that trains
        self._early: bytes | None = None
        self._at_gradient: bytes | None = None  # the rank's own part when the step's first gradient was there
        self._first_gradient = FirstGradient(self._on_gradient)
        self._trusts_gradient: bool | None = None  # whether that was what the next boundary had; None: not known yet
        self._held_at = 0.0
        self._step_s = 0.0  # between the last two boundaries
        self._is_given_up = False
        self._is_told = False
        self._saved = -1  # the step that was saved last
        self._trusts_early = True  # what is recorded before optimizer steps was right so far

    def state(self) -> Any:
        """Return what is saved."""
        return self._state()

    @property
    def shared(self) -> str | None:
        """Return the name of the ranks that have the same tensors, "" for all ranks; None: no others have them."""
        return None if self._parts is None else self._parts.group

    def __call__(self, step: int) -> SaveHandle:
        """Save the state of ``step`` steps."""
        self._saved = step
        return self._checkpoint.save(step, self._state())

    def hold(self, step: int) -> None:
        """Take note that the state is that of ``step`` finished steps, until the next optimizer's step begins."""
        self._trainer = threading.get_ident()
        now, self._is_given_up = time.monotonic(), False
        self._step_s, self._held_at = now - self._held_at if self._held_at else 0.0, now
        try:
            held = HeldState(step, self._state(), self._watched)
            self._checkpoint.mark_boundary(held)
            self._record_boundary(held)
        except Exception as error:  # noqa: BLE001 - of the state's own code, too; a save will raise it
            why = str(error) if isinstance(error, ResilioError) else f"{type(error).__name__}: {error}"
            self._drop(why)
            self._tell(why)
            return
        with self._lock:
            self._held, self._why_not, self._watched = held, "", held.watched
        if "torch" in sys.modules:
            fence_before_steps(self)

    def give_up_step(self) -> None:
        """Take note that the step which has begun will not end: no save waits for its boundary."""
        self._is_given_up = True

    def fence(self) -> None:
        """Take note that an optimizer's step begins."""
        with self._lock:  # a snapshot that is being taken comes first
            held = self._held
            if held is None:
                return
            self._drop(_IN_STEP)
        if self._trusts_early and self._early is None and self._records is not None:
            self._early = self._own_part_now()
            if self._early is None:
                self._trusts_early = False
            else:
                self._write(held.step + 1, self._early, True)

    def _on_gradient(self) -> None:
        """Record what the next boundary will have, if it was always that: other ranks may finish this step.

        Gradients are exchanged from here on, and a rank that is lost then has peers that do, and peers that do not.
        """
        held = self._held
        if held is None or self._records is None or self._at_gradient is not None or self._trusts_gradient is False:
            return
        self._at_gradient = self._own_part_now()
        if self._trusts_gradient and self._at_gradient is not None:
            self._early = self._at_gradient
            self._write(held.step + 1, self._early, True)

    def _own_part_now(self) -> bytes | None:
        try:
            return own_part(self._state(), self._parts or WHOLE)
        except Exception:  # noqa: BLE001 - the state's own code, in the midst of a step: its boundary will tell
            return None

    def put_back(self, point: RestorePoint, state: Any) -> PutBack | None:
        """Return the state, brought back where it is, if this process has held it since an earlier round; else None."""
        with self._lock:
            held = self._held
        is_wanted = held is not None and (point.source, point.step) == (Tier.MEMORY, held.step)
        if held is None or not is_wanted or state is None or self._round == self._checkpoint.place.round:
            return None
        with contextlib.suppress(CheckpointError):
            part = b"" if self._parts is None else held.own_part(self._parts)
            return PutBack(put_back(held, state), held.step, part)
        return None

    def save_held(self) -> int:
        """Take a snapshot of the last finished step, and return its number. Raises CheckpointError, OSError.

        It becomes durable with the restart that follows.
        """
        if threading.get_ident() != self._trainer:
            until = time.monotonic() + min(max(IN_STEP_S, _AS_LONG * self._step_s), MOST_IN_STEP_S)
            while self._why_not == _IN_STEP and not self._is_given_up and time.monotonic() < until:
                time.sleep(_LOOK_S)
        with self._lock:
            held = self._held
            if held is None:
                raise NotHeld(self._why_not)
            self._checkpoint.save_held(held)
            return held.step

    @property
    def holds_boundary(self) -> bool:
        """Return whether ``save_boundary`` can save: the last finished step is held, and was not saved before."""
        return self._held is not None and self._held.step != self._saved

    def save_boundary(self, live: Any) -> SaveHandle:
        """Save the last finished step as it was, but ``live``, an object of the state, as it is now.

        For an object that has to tell the next job what it found in the step after. Raises NotHeld.
        """
        with self._lock:
            held = self._held
        if held is None or not self.holds_boundary:
            raise NotHeld(self._why_not or "this step is saved already")
        return self._checkpoint.save(held.step, held.with_live(self._state(), live))

    def _drop(self, why: str) -> None:
        self._why_not = why
        self._held = None

    def _record_boundary(self, held: HeldState) -> None:
        """Leave in shared memory what is this rank's own, where other ranks hold the same tensors."""
        before = self._parts
        if not self.replicated and self._parts_of is not held.watched:
            self._parts, self._parts_of = held.parts(self._group), held.watched
        if self._parts is None:
            return
        if not self._is_opened:
            self._is_opened = True
            try:
                self._records = self._checkpoint.record_writer()
            except OSError as error:
                self._tell(str(error))
        if self._records is not None:
            part = held.own_part(self._parts)
            self._write(held.step, part, False)
            is_comparable = self._parts == before  # the first step makes the optimizer's state, and so other parts
            if is_comparable and self._at_gradient is not None:
                self._trusts_gradient = self._trusts_gradient is not False and self._at_gradient == part
            if is_comparable and (self._early is not self._at_gradient or self._early is None):
                self._trusts_early = self._trusts_early and self._early in (None, part)
            self._early = self._at_gradient = None
            self._first_gradient.watch(held.watched, self._trusts_gradient is not False)

    def _write(self, step: int, part: bytes, is_early: bool) -> None:
        """Write a record. Where there is no room, there are none from then on, and training goes on."""
        if self._records is not None:
            try:
                self._records.write(step, part, is_early)
            except OSError as error:
                self._records = None
                self._tell(f"shared memory: {error}")

    def _tell(self, why: str) -> None:
        if not self._is_told and self._checkpoint.place.rank == 0:  # one line for all ranks
            self._is_told = True
            say(f"a failure will cost the steps since the last save: {why}")
