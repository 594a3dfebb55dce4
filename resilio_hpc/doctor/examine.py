"""Runs the checks, each in a child of its own: one that hangs, crashes or cannot be imported says so, and no more."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from resilio_hpc.core.errors import ResilioError, os_error_text
from resilio_hpc.core.json_fields import printable
from resilio_hpc.doctor.finding import DoctorCheck, DoctorFinding, DoctorState, DoctorView, failed, not_here
from resilio_hpc.prolog_epilog.base.isolated import Child, Ended, Mark, gather

_AT_ONCE = 8  # each has a pipe, and the limit on open files may be low
_LEAVE_S = 15.0  # for children to remove their files when the user interrupts
_TEXT = 600


@dataclass(frozen=True)
class DoctorResult:
    """The findings of a check, at least one, and how long it took."""

    check: DoctorCheck
    findings: tuple[DoctorFinding, ...]
    seconds: float


def examine(checks: Sequence[DoctorCheck], view: DoctorView) -> list[DoctorResult]:
    """Run the checks, some at a time; return their results in the order given."""
    return _Examination(checks, view).run()


class _Examination:
    def __init__(self, checks: Sequence[DoctorCheck], view: DoctorView) -> None:
        self._view = view
        self._order = list(checks)
        self._waiting = list(checks)
        self._running: dict[Child, DoctorCheck] = {}
        self._done: dict[str, DoctorResult] = {}

    def run(self) -> list[DoctorResult]:
        children: list[Child] = []
        self._start(children)
        try:
            gather(children, lambda child, ended: self._ended(children, child, ended))
        except BaseException:
            self._leave(children)
            raise
        return [self._done[check.name] for check in self._order]

    def _start(self, children: list[Child]) -> None:
        """Start the checks that need not wait; those without their ground get their finding at once."""
        while (check := self._next()) is not None:
            self._waiting.remove(check)
            missing = [name for name in check.after if name in self._done and not _stands(self._done[name])]
            if missing:
                self._done[check.name] = DoctorResult(check, (_not_looked_at(missing, self._done),), 0.0)
                continue
            try:
                child = Child(partial(_answer, check, self._view), check.budget_s)
            except OSError as error:  # a limit on processes, or on open files
                if self._running:
                    self._waiting.insert(0, check)
                    return  # until one of them has ended
                self._done[check.name] = DoctorResult(check, (_no_process(error),), 0.0)
                continue
            self._running[child] = check
            children.append(child)

    def _next(self) -> DoctorCheck | None:
        """Return a check that waits for no other one."""
        if len(self._running) >= _AT_ONCE:
            return None
        unsettled = {check.name for check in (*self._waiting, *self._running.values())}
        return next((check for check in self._waiting if unsettled.isdisjoint(check.after)), None)

    def _ended(self, children: list[Child], child: Child, ended: Ended) -> None:
        check = self._running.pop(child)
        self._done[check.name] = DoctorResult(check, tuple(findings_of(check, ended)), ended.seconds)
        self._start(children)

    def _leave(self, children: list[Child]) -> None:
        """Let running checks remove their files."""
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
            child.deadline = min(child.deadline, time.monotonic() + _LEAVE_S)
        gather(children, lambda child, ended: None)


def _answer(check: DoctorCheck, view: DoctorView, mark: Mark) -> bytes:
    """Look, in the child, and return the findings as JSON."""
    _be_quiet()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    try:
        found = check.look(dataclasses.replace(view, mark=mark))
    except ModuleNotFoundError as error:
        found = _broken(check, f"the Python package {error.name} is missing", f"pip install {error.name}")
    except OSError as error:
        found = _broken(check, os_error_text(error, "this machine"))
    except ResilioError as error:
        found = _broken(check, str(error))
    except Exception as error:  # noqa: BLE001 - it becomes the finding, and all other checks go on
        found = _broken(check, f"{type(error).__name__}: {error}")
    findings = found if isinstance(found, list) else [found]
    return json.dumps([{**dataclasses.asdict(one), "state": one.state.value} for one in findings]).encode()


def _be_quiet() -> None:
    """Keep what libraries print at their import, or their end, off the report."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _interrupted(number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def findings_of(check: DoctorCheck, ended: Ended) -> list[DoctorFinding]:
    """Return what a child has said, or what its end says."""
    if ended.answer is not None:
        said = [DoctorFinding(**{**one, "state": DoctorState(one["state"])}) for one in json.loads(ended.answer)]
        return [_in_one_line(one) for one in said] or [_broken(check, "it said nothing")]
    at = f" at {_culprit(ended.touched)}" if ended.touched else ""
    if ended.overdue:
        stuck = f" (process {ended.stuck.pid} cannot be killed: {ended.stuck.where})" if ended.stuck else ""
        return [
            DoctorFinding(
                _worst(check),
                f"no answer within {check.budget_s:g} s{at}{stuck}",
                "What hangs here hangs in a launch, too.",
                "look at what serves it: a mount, a daemon, a driver (see dmesg)",
            )
        ]
    how = f"ended by {signal.Signals(ended.signal).name}" if ended.signal else "ended without an answer"
    return [_broken(check, f"its process {how}{at}")]


def _culprit(touched: str) -> str:
    """Return what was touched last, a path with the mount that it is on."""
    try:
        from resilio_hpc.prolog_epilog.base import mounts

        return mounts.culprit(touched, mounts.parse_mountinfo(Path(mounts.MOUNTINFO).read_text()))
    except (ImportError, OSError, ResilioError):
        return touched


def _in_one_line(one: DoctorFinding) -> DoctorFinding:
    texts = (printable(text, _TEXT) for text in (one.seen, one.means, one.todo, one.about))
    return DoctorFinding(one.state, *texts)


def _worst(check: DoctorCheck) -> DoctorState:
    return DoctorState.FAILED if check.needed else DoctorState.WARNING


def _broken(check: DoctorCheck, why: str, todo: str = "mend that, and ask again") -> DoctorFinding:
    return DoctorFinding(_worst(check), f"cannot be looked at: {why}", "Whether it works is unknown.", todo)


def _no_process(error: OSError) -> DoctorFinding:
    return failed(
        f"no process can be started: {error.strerror}",
        "A launch starts several for each rank.",
        "raise the limit on processes (ulimit -u), or free memory",
    )


def _stands(result: DoctorResult) -> bool:
    return not any(one.state in (DoctorState.FAILED, DoctorState.NOT_HERE) for one in result.findings)


def _not_looked_at(missing: Sequence[str], done: dict[str, DoctorResult]) -> DoctorFinding:
    """Return the finding of a check that tells nothing without others."""
    broken = [name for name in missing if any(one.state is DoctorState.FAILED for one in done[name].findings)]
    if broken:
        return not_here(f"not tried, since this failed: {', '.join(broken)}")
    return not_here(done[missing[0]].findings[0].seen)
