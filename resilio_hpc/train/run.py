"""The training loop for the launcher: steps done, saves, the agreed stop, the end.

All of it is optional; without resilio-launch it is a plain loop that saves.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from resilio_hpc.ckpt.coordination import agent_link
from resilio_hpc.core import gloo_groups
from resilio_hpc.core.errors import SaveRefused
from resilio_hpc.core.rank_link import (
    LAST_CHECKPOINT,
    STANDBY_VARIABLE,
    Finished,
    PauseConfirmed,
    Resume,
    SaveAt,
    SaveLastStep,
    Section,
    StopAt,
    StopConfirmed,
    Stopped,
)
from resilio_hpc.train.agreed_stop import AgreedStop, leave_signals_to_the_agent
from resilio_hpc.train.last_step import LastStep, StepHolder, the_last_step
from resilio_hpc.train.logged_values import LoggedValues
from resilio_hpc.train.place import forget_place, place_in, raise_missing
from resilio_hpc.train.step_loop import Save, StepLoop, Waitable

_PATIENCE_S = 10.0  # before a user is told what the end of training waits for
_LOOK_S = 0.05


@dataclass(eq=False)
class Run:
    """This process's place in the run; ``attach()`` makes it."""

    rank: int
    world_size: int
    local_rank: int
    round: int  # grows with every restart of the ranks, over the whole run
    restart_count: int  # restarts within this job, as torchrun counts them
    run_dir: Path | None  # shared by all nodes; None without resilio-launch
    checkpoint_dir: Path
    launched: bool  # by resilio-launch
    tensor_parallel: int = 1  # these three: of this round, by resilio-launch's --layout
    pipeline_parallel: int = 1
    data_parallel: int = 1
    micro_batch: int = 0  # that the planner chose for this round (--layout auto); 0: nothing was chosen
    collective_timeout: timedelta | None = None  # for torch.distributed; None without resilio-launch: torch's own
    _link: agent_link.AgentLink | None = field(default=None, repr=False)
    _stop: AgreedStop | None = field(default=None, repr=False)
    _stopping: bool = field(default=False, repr=False)
    _last_step: LastStep | None = field(default=None, repr=False)
    _section: str = field(default="", repr=False)
    _doing: int = field(default=0, repr=False)  # steps that are complete when the present one is
    _logged: LoggedValues | None = field(default=None, repr=False)
    _save_at: int = field(default=-1, repr=False)  # a step to be saved on a user's order
    _patience_s: float = field(default=_PATIENCE_S, repr=False)

    @property
    def data_parallel_rank(self) -> int:
        """Return which copy of the model this rank is part of.

        Tensor-parallel ranks are neighbours and pipeline stages lie farthest apart: Megatron-LM's order, and that of a
        device mesh (pipeline, data, tensor).
        """
        return self.rank // self.tensor_parallel % self.data_parallel

    def steps(
        self, start: int, total: int, save: Save | None = None, every: int = 0, compare_within: int = 100
    ) -> Iterator[int]:
        """Yield the step indices ``start`` … ``total - 1``; between two of them, do what resilience needs.

        When a body is done, the step is reported, and ``save(completed_steps)`` is called where that number is a
        multiple of ``every`` (0: never), and at the end. When all ranks agreed to stop (time limit, SIGTERM), the
        iterator saves, waits until the checkpoint is committed and raises ``SystemExit(0)``: ``finally`` blocks and
        exit handlers run, and the next job goes on from there. After the last step it saves, waits and tells the
        launcher that training is complete. A loop that is left early (``break``) has to call ``finish`` itself. With
        ``save=checkpoint.saver(state)`` a failure costs the step that it interrupts, and not those since the last save.
        Where ranks hold the same tensors, a difference of them is known within ``compare_within`` steps (0: never).
        """
        loop = StepLoop(self, save, every, compare_within)
        stop = loop.begin(start, total, is_over=start >= total)
        while start < total and not stop:
            yield start
            start += 1
            stop = loop.boundary(start, is_last=start == total)
        loop.leave_if(stop, start)
        loop.end(start)

    def _holder_of(self, save: object) -> StepHolder | None:
        """Return what can save the last finished step, if the launcher may ask for that."""
        if self._last_step is None or not isinstance(save, StepHolder):
            return None
        self._last_step.offer(save)
        return save

    def _hold(self, holder: StepHolder, step: int) -> None:
        holder.hold(step)
        if self._last_step is not None:
            self._last_step.holds(holder.shared)

    def step_done(self, completed: int) -> bool:
        """Report ``completed`` steps, for loops of your own; return whether all ranks stop here.

        Then ``save_last``, call ``finish(completed)`` and exit with 0. The call may wait, at a boundary where a stop is
        being agreed; it must be made after every step, since ranks are promised to stop.
        """
        self._report(completed)
        return self._stop_here(completed)

    def log(self, step: int | None = None, /, **values: object) -> None:
        """Tell the launcher of numbers of a step, for the live view and the report: ``run.log(loss=loss, tokens=n)``.

        ``tokens`` and ``samples``: how many the step took, of all ranks. ``step``: steps that are complete with it, in
        loops of your own. Never waits. One rank of each pipeline stage speaks for all; nothing happens elsewhere.
        """
        if self._logged is not None:
            self._logged.take(self._doing if step is None else step, values)

    def save_last(self, completed: int, save: Save, handle: Waitable | None = None) -> None:
        """Save before leaving, and return when it is committed; ``handle``: of ``save(completed)``, already called.

        A normal save may be refused, because earlier ones are still being written. This one waits for them, as long as
        it takes: the training since then would be lost. Raises CheckpointError when it cannot be committed.
        """
        with self.section(LAST_CHECKPOINT):
            self._save_last(completed, save, handle)

    def _save_last(self, completed: int, save: Save, handle: Waitable | None) -> None:
        tell_at = time.monotonic() + self._patience_s
        while True:
            try:
                handle = handle or save(completed)
                if handle is not None:
                    handle.wait("committed")
                return
            except SaveRefused as refused:
                if time.monotonic() > tell_at:
                    print(f"resilio: rank {self.rank}: still waiting: {refused}", file=sys.stderr, flush=True)
                    tell_at = math.inf
                handle = None
                time.sleep(_LOOK_S)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Do something beside the steps, such as an evaluation: ``with run.section("evaluation"):``.

        How long it may last is learned for each name, so that it is no hang, and a hang in it is found. Saves of
        ``steps`` and ``save_last`` are sections by themselves. Nothing happens without the launcher.
        """
        outer, self._section = self._section, name
        self._tell_section()
        try:
            yield
        finally:
            self._section = outer
            self._tell_section()

    def _tell_section(self) -> None:
        if self._link is not None:
            self._link.send(Section(self._section))

    def finish(self, completed: int) -> None:
        """Leave training on purpose after ``completed`` steps: exiting with 0 is right from here on."""
        if self._logged is not None:
            self._logged.end()
        if self._link is not None:
            self._link.send(Stopped(completed) if self._stopping else Finished(completed))

    def give_up_step(self) -> None:
        """Take note that the training thread has left its step by an error."""
        if self._last_step is not None:
            self._last_step.give_up_step()

    def save_finished_step(self) -> None:
        """Save the last finished step, where ``steps`` was given a saver: this rank cannot go on."""
        if self._last_step is not None:
            self._last_step.save()

    def _listen(self) -> None:
        """Take the agent's words of this round."""
        link = self._link
        assert link is not None
        speaks = self.data_parallel_rank == 0 and self.rank % self.tensor_parallel == 0
        self._logged = LoggedValues(link.offer) if speaks else None
        stop = self._stop = AgreedStop(link.send)
        link.subscribe(StopAt, stop.on_stop_at)
        link.subscribe(StopConfirmed, stop.on_stop_confirmed)
        link.subscribe(PauseConfirmed, stop.on_pause_confirmed)
        link.subscribe(Resume, stop.on_resume)
        link.on_close(stop.on_lost)
        self._last_step = the_last_step(link.send)
        link.subscribe(SaveLastStep, self._last_step.on_order)

    def _enter(self, environment: Mapping[str, str]) -> None:
        """Take this process's place in another round."""
        for name, value in place_in(environment, True).items():
            setattr(self, name, value)
        self._stopping, self._section, self._save_at = False, "", -1
        self._listen()

    def __getattr__(self, name: str) -> NoReturn:
        raise_missing(name)

    def _on_save_at(self, message: SaveAt) -> None:
        self._save_at = message.step

    def _report(self, completed: int) -> None:
        self._doing = completed + 1
        if self._link is not None:
            self._link.step_done(completed)

    def _stop_here(self, completed: int) -> bool:
        if self._stop is not None:
            self._stopping = self._stop.at_boundary(completed)
        return self._stopping


_attached: list[Run] = []


def attach() -> Run:
    """Connect to the launcher that started this rank. Harmless, and all there is to it, without one.

    Under the launcher SIGTERM, SIGUSR1 and SIGUSR2 are left to the agent, which makes an agreed stop of them; the
    script's own handlers stay. Takes torch.distributed's rank where it is initialised, else torchrun's environment (a
    lone process is rank 0 of 1). Raises UsageError where the two contradict. Further calls return the same Run. Gloo's
    process groups live from now on as long as the process, since torch 2.13 can deadlock where one is destroyed.
    """
    gloo_groups.keep_alive()
    if not _attached:
        _attached.append(_attach(os.environ))
    return _attached[0]


def _attach(
    environment: Mapping[str, str],
    connect: Callable[[Mapping[str, str]], agent_link.AgentLink | None] = agent_link.current,
) -> Run:
    """Attach; ``connect`` returns the link to the agent, None without one."""
    link = connect(environment)
    run = Run(**place_in(environment, link is not None), launched=link is not None)
    if link is not None:
        run._link = link
        run._listen()
        link.subscribe(SaveAt, run._on_save_at)
        link.on_enter(run._enter)
        leave_signals_to_the_agent()
        if STANDBY_VARIABLE in environment:
            forget_place(run)
            run._logged = None  # it speaks for no rank yet
    return run
