"""The rank's side of an agreed stop: all ranks leave training, or pause, at the same step boundary.

The controller proposes a boundary (StopAt). A rank that has begun a step beyond it declines, the others accept and
wait when they reach it, until it is confirmed (StopConfirmed, PauseConfirmed) or a later one is proposed. The listener
thread answers at once, so a rank deep inside a long step does not hold the agreement up. A pause ends with Resume, with
another proposal, with its time limit, or with the agent.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from resilio_hpc.core.rank_link import PAUSED, PauseConfirmed, Resume, Section, StopAck, StopAt, StopConfirmed

# longer than any healthy round of proposals, shorter than a collective's timeout: training must not wait for ever for a
# controller that is gone
PATIENCE_S = 60.0


class AgreedStop:
    """The state of an agreed stop.

    The training thread (``at_boundary``) and the link's listener (``on_...``) share it.
    """

    def __init__(self, reply: Callable[[StopAck | Section], None], patience_s: float = PATIENCE_S) -> None:
        self._reply = reply
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._begun: int | None = None  # steps begun, all complete except perhaps the last; None: no loop yet
        self._target: int | None = None
        self._confirmed: int | None = None
        self._pause_s: float | None = None  # the target is a pause, of at most so many seconds
        self._lost = False

    def on_stop_at(self, message: StopAt) -> None:
        """Answer a proposal; one that comes before the training loop is answered when the loop begins."""
        with self._changed:
            self._target = message.target
            self._confirmed = self._pause_s = None
            if self._begun is not None:
                self._answer(self._begun)
            self._changed.notify_all()

    def on_stop_confirmed(self, message: StopConfirmed) -> None:
        """Take note that every rank accepted the boundary."""
        with self._changed:
            self._confirmed = message.target
            self._changed.notify_all()

    def on_pause_confirmed(self, message: PauseConfirmed) -> None:
        """Take note that every rank accepted the boundary, to wait there."""
        with self._changed:
            if message.target == self._target:
                self._pause_s = message.limit_s
                self._changed.notify_all()

    def on_resume(self, _: Resume) -> None:
        """Go on: the pause is over, or will not come."""
        with self._changed:
            self._target = self._confirmed = self._pause_s = None
            self._changed.notify_all()

    def on_lost(self) -> None:
        """Take note that the agent is gone: no process can confirm any more."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def at_boundary(self, completed: int) -> bool:
        """Return whether all ranks stop here, after ``completed`` steps.

        It waits at a boundary that this rank accepted, at most ``patience_s`` seconds, or as long as a pause lasts;
        then training goes on.
        """
        with self._changed:
            unanswered = self._begun is None and self._target is not None
            self._begun = completed
            if unanswered:
                self._answer(completed)
            while self._target is not None and self._target <= completed:
                if self._pauses_at(completed):
                    self._pause()
                    continue
                self._changed.wait_for(lambda: self._settled(completed), self._patience_s)
                if self._confirmed == completed and self._target == completed:
                    return True
                if self._target is not None and self._target <= completed and not self._pauses_at(completed):
                    self._target = None
            self._begun = completed + 1
            return False

    def _pauses_at(self, completed: int) -> bool:
        return self._pause_s is not None and self._target == completed

    def _pause(self) -> None:
        """Wait until the pause is over; without an end in time, it has ended all the same."""
        self._reply(Section(PAUSED))
        self._changed.wait_for(lambda: self._pause_s is None or self._lost, self._pause_s)
        if self._pause_s is not None:
            self._target = self._pause_s = None
        self._reply(Section(""))

    def _settled(self, completed: int) -> bool:
        raised = self._target is None or self._target > completed
        return raised or self._confirmed == completed or self._pauses_at(completed) or self._lost

    def _answer(self, begun: int) -> None:
        assert self._target is not None
        accepted = begun <= self._target
        self._reply(StopAck(target=self._target, accepted=accepted, step=begun))
        if not accepted:
            self._target = None


def leave_signals_to_the_agent() -> None:
    """Leave SIGTERM and warnings to the agent: Slurm may send them to every process of a step.

    The agent turns them into a stop that all ranks agree on. A handler of the script's own stays. Outside of the main
    thread nothing can be set, and nothing is.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _heed_not)  # child programs get the default again


def _heed_not(_number: int, _frame: object) -> None:
    """Ignore the signal."""
