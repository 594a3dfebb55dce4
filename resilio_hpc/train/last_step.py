"""The rank's side of the last save: when ranks cannot go on, the step that they finished last is still saved.

A rank that raised an exception saves before it ends. One that waits in a collective for a lost rank is asked by its
agent, and saves in another thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from resilio_hpc.core.rank_link import HoldsSteps, LastStepMessage, LastStepSaved, SaveLastStep, SavingLastStep


@runtime_checkable
class StepHolder(Protocol):
    """A save that can be made up for later; ``ckpt.Checkpointer.saver`` returns one.

    ``replicated``: all ranks have the same tensors.
    """

    replicated: bool

    @property
    def shared(self) -> str | None:
        """Return the name of the ranks that have the same tensors, "" for all ranks; None: no others have them."""

    def hold(self, step: int) -> None:
        """Take note that ``step`` steps are finished, and the next one begins."""

    def give_up_step(self) -> None:
        """Take note that the step which has begun will not end."""

    def save_held(self) -> int:
        """Save the step that was held last, and return its number. From any thread."""

    def state(self) -> Any:
        """Return what is saved."""


ORDER_S = 0.5
_OF_A_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Socket closed",
    "NCCL",
    "remote process",
)


class LastStep:
    """Saves the last finished step, once."""

    def __init__(self, send: Callable[[LastStepMessage], None]) -> None:
        """``send``: sends a message to the agent."""
        self._send = send
        self._holder: StepHolder | None = None
        self._lock = threading.Lock()
        self._is_saved = False
        self._is_ordered = threading.Event()
        self.shared: str | None = None

    def offer(self, holder: StepHolder) -> None:
        """Take what saves the last finished step."""
        with self._lock:
            self._holder, self._is_saved = holder, False
        self._tell(holder.shared)

    def give_up_step(self) -> None:
        """Take note that the training thread has left its step by an error."""
        if self._holder is not None:
            self._holder.give_up_step()

    def holds(self, shared: str | None) -> None:
        """Take note of a step's end, after which other ranks may have the same tensors."""
        if shared != self.shared:
            self._tell(shared)

    def _tell(self, shared: str | None) -> None:
        self.shared = shared
        self._send(HoldsSteps(shared is not None, shared or ""))

    def on_order(self, order: SaveLastStep) -> None:
        """Save in a thread of its own: the training thread waits for ranks that are lost."""
        self._is_ordered.set()
        threading.Thread(target=self.save, args=(order.ahead,), name="resilio-last-step", daemon=True).start()

    def await_order(self) -> None:
        """Wait for the agent's order, which comes soon after a rank's end was seen, if it comes."""
        if self._holder is not None:
            self._is_ordered.wait(ORDER_S)

    def save(self, ahead: bool = False) -> None:
        """Save, unless that was done. ``ahead``: training may go on, and a later step is to be saved then."""
        with self._lock:
            if self._holder is None or self._is_saved:
                return
            self._send(SavingLastStep())
            try:
                saved = LastStepSaved(self._holder.save_held())
                self._is_saved = not ahead
            except Exception as error:  # noqa: BLE001 - a state's own code runs here; ranks restart from an older step
                saved = LastStepSaved(-1, f"{type(error).__name__}: {error}"[:1000])
            self._send(saved)


_last: list[LastStep] = []


def the_last_step(send: Callable[[LastStepMessage], None]) -> LastStep:
    """Return the one of this process."""
    _last[:] = [LastStep(send)]
    return _last[0]


def is_of_a_lost_peer(error: BaseException) -> bool:
    """Return whether an error reads like the end of another rank."""
    return any(text in str(error) for text in _OF_A_LOST_PEER)


def save_before_end(error: BaseException) -> None:
    """Save the last finished step before this process ends because of an error.

    Where a connection broke, another rank has ended. Where ranks do not have the same tensors, it helps only if that
    one has saved, too. The agent knows: it orders the save, or ends this rank.
    """
    try:
        for one in _last:
            if is_of_a_lost_peer(error) and one.shared is None:
                one.await_order()
            one.save()
    except BaseException as other:  # noqa: BLE001 - the process ends because of another error, which is to be seen
        print(f"resilio: the last finished step is not saved: {other!r}", file=sys.stderr)
