"""What resilience needs between two steps of training, for ``Run.steps`` and for loops that frameworks own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from resilio_hpc.ckpt.coordination.agent_link import AgentLink
from resilio_hpc.core.rank_link import StepsPlanned
from resilio_hpc.train.compared_replicas import sweep_of
from resilio_hpc.train.last_step import StepHolder
from resilio_hpc.train.validation.replica_groups import ReplicaPlace


class Waitable(Protocol):
    """The result of a save, if any; ``ckpt.SaveHandle`` is one."""

    def wait(self, stage: Literal["committed"]) -> object:
        """Return when the checkpoint is committed; raise when it never will be: SaveRefused if it may be made again."""


Save = Callable[[int], Waitable | None]

CHECKPOINT = "checkpoint"  # the section of saves between steps


class StepKeeper(ReplicaPlace, Protocol):
    """What keeps account of this process's steps: ``train.Run``."""

    _link: AgentLink | None
    _doing: int
    _save_at: int

    def section(self, name: str) -> AbstractContextManager[None]:
        """Do something beside the steps."""

    def save_last(self, completed: int, save: Save, handle: Waitable | None = None) -> None:
        """Save before leaving."""

    def finish(self, completed: int) -> None:
        """Leave training on purpose."""

    def _holder_of(self, save: object) -> StepHolder | None: ...

    def _hold(self, holder: StepHolder, step: int) -> None: ...

    def _report(self, completed: int) -> None: ...

    def _stop_here(self, completed: int) -> bool: ...


class StepLoop:
    """One loop over steps: ``begin``, ``boundary`` after each step, ``end``.

    ``completed`` is the number of steps that are complete. Nothing else may change the state between a step's end and
    its ``boundary``.
    """

    def __init__(self, run: StepKeeper, save: Save | None, every: int, compare_within: int = 100) -> None:
        """As ``Run.steps``."""
        self._run, self._save, self._every = run, save, every
        self._compare_within = compare_within
        self._holder: StepHolder | None = None
        self._saved_at = -1
        self._handle: Waitable | None = None
        self.has_begun = self._is_ended = False

    def begin(self, start: int, total: int, is_over: bool = False) -> bool:
        """Go on after ``start`` steps; return whether all ranks stop here. ``is_over``: no step follows."""
        run = self._run
        self.has_begun = True
        self._holder = run._holder_of(self._save)
        if run._link is not None and run.rank == 0:
            run._link.offer(StepsPlanned(start, total))
        stop = not is_over and run._stop_here(start)
        if self._holder is not None and not is_over:
            run._hold(self._holder, start)
        self._sweep = sweep_of(self._holder, run._link, run, self._compare_within)
        run._doing = start + 1
        return stop

    def boundary(self, completed: int, is_last: bool = False) -> bool:
        """Take note of a step's end, and save where that is due; return whether all ranks stop here.

        ``is_last``: no step follows, so ranks need not agree on a stop.
        """
        run = self._run
        if self._holder is not None:
            run._hold(self._holder, completed)  # first: a rank may be killed while it saves
        if self._sweep is not None:
            self._sweep.at_boundary(completed)
        run._report(completed)
        stop = not is_last and run._stop_here(completed)
        is_due = (self._every and completed % self._every == 0) or completed == run._save_at
        if self._save is not None and is_due and not stop:
            with run.section(CHECKPOINT):
                self._saved_at, self._handle = completed, self._save(completed)
        return stop

    def leave_if(self, stop: bool, completed: int) -> None:
        """Where all ranks ``stop`` here: end, and raise SystemExit(0)."""
        if stop:
            self.end(completed)
            raise SystemExit(0)

    def end(self, completed: int) -> None:
        """Save what is not saved, wait until it is committed, and leave training on purpose, once.

        Nothing is saved where training was complete before it began.
        """
        if self._is_ended:
            return
        self._is_ended = True
        if self.has_begun and self._save is not None and (self._saved_at != completed or self._handle is not None):
            self._run.save_last(completed, self._save, self._handle if self._saved_at == completed else None)
        self._run.finish(completed)
