"""Why a run is where it is: what broke, how sure that is, what was done, and how it stands now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resilio_hpc.core import trusted_files
from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.core.terminal import local_time
from resilio_hpc.diagnose.causes.pattern_table import CauseClass, shipped
from resilio_hpc.events.event_text import words
from resilio_hpc.events.failure_text import rank_failed
from resilio_hpc.events.phrases import names, plural, seconds
from resilio_hpc.events.rungs import rung_words
from resilio_hpc.report.accounting.run_time import run_time
from resilio_hpc.report.chain.first_error import CLASSES, class_of
from resilio_hpc.report.chain.recoveries import KINDS as RECOVERY_KINDS
from resilio_hpc.report.chain.recoveries import ChainRecovery, RecoveryOutcome, recoveries
from resilio_hpc.report.chain.report_json import recovery_object
from resilio_hpc.report.chain.run_report import KINDS as REPORT_KINDS
from resilio_hpc.report.overview import find_run, read_identity
from resilio_hpc.report.present import RunNow, RunVerdict, facts_of, parse_verdict, present
from resilio_hpc.report.progress import progress
from resilio_hpc.report.screen_tables import fault_words
from resilio_hpc.report.status import parse_status

VERSION = 1
KINDS = REPORT_KINDS | RECOVERY_KINDS
KINDS |= {"stalled", "hang", "goes_on", "start", "launch_failed", "local_failed", "layout"}
_LONGEST = 400  # of a text from the ledger
_GOES_ON = {"time_limit", "needs_new_job", "terminated"}  # verdicts of a part whose run a next job carries on


@dataclass(frozen=True)
class RunWhy:
    """What is to be said of a run. ``broke``: the fault that the text is about, None where there was none.

    ``again``: how many earlier faults were the same; ``sentences``: the paragraph; ``to_do``: "" where nothing is.
    """

    path: Path
    run_id: str
    now: float
    state: RunNow
    step: int | None
    broke: ChainRecovery | None
    faults: int
    again: int
    sentences: tuple[str, ...]
    to_do: str

    @property
    def text(self) -> str:
        """Return the paragraph."""
        return " ".join(self.sentences)


def read_why(path: Path, now: float) -> RunWhy:
    """Return what is to be said of a run directory. Raises UsageError, Untrusted."""
    path = find_run(path)
    identity = read_identity(path)
    status = parse_status(trusted_files.read_object(path / "status.json"))
    verdict = parse_verdict(trusted_files.read_object(path / "verdict.json"))
    events = read_ledger(path / "ledger", KINDS)
    return explain(path, identity[0], events, present(facts_of(events), identity[1], status, verdict, now), now)


def explain(path: Path, run_id: str, events: Sequence[Event], state: RunNow, now: float) -> RunWhy:
    """Return what is to be said. ``events`` by time. Pure."""
    time = run_time(events, state.status.time if state.status is not None else None)
    found = recoveries(events, time, state.state in ("starting", "running") or _is_carried_on(state, events))
    broke = found[-1] if found else None
    same = [one for one in found[:-1] if broke is not None and _alike(one) == _alike(broke)]
    facts = facts_of(events)
    is_complete = state.verdict is not None and state.verdict.verdict == "completed"
    total = progress(events, None, now).total if is_complete else None
    steps = [state.status.step if state.status else None, facts.committed]
    if state.verdict is not None and not is_complete:
        steps.append(_heard(state.verdict))  # a status is written at times only: it may know of no step of a short run
    step = max((one for one in steps if one is not None), default=total)
    is_last = total is None or step == total  # a script may end early, and need not save its last step
    to_do = _to_do(broke, state)
    recovers = broke is not None and broke.outcome is RecoveryOutcome.UNDER_WAY
    sentences = [_now(state, step if is_last else None, now, recovers), *_silence(events, state)]
    if not is_last:
        sentences.append(f"Its newest checkpoint is of step {step}; {total} were planned.")
    if broke is None:
        sentences.append("No fault of a rank or a node is on record.")
    else:
        sentences += [*_broke(broke, now), *_sure(broke), *_again(same), *_done(broke)]
        others = len(found) - 1 - len(same)
        if others:
            sentences.append(f"Before it there {'was' if others == 1 else 'were'} {plural(others, 'other fault')}.")
    sentences += [*_layout(events), *_after(state, events)]
    if to_do:
        sentences.append(f"To do: {to_do}.")
    return RunWhy(path, run_id, now, state, step, broke, len(found), len(same), tuple(sentences), to_do)


def _heard(verdict: RunVerdict) -> int | None:
    """Return the furthest step that the controller knew of at the end."""
    step = Fields(verdict.fields).whole("step")
    return step if step is not None and step >= 0 else None


def _alike(one: ChainRecovery) -> tuple[object, ...]:
    """Return what two faults have in common that are the same: the kind and the program's line, or node and message."""
    if one.place:
        return one.fault.kind, one.place
    return one.fault.kind, one.fault.node, (one.root.splitlines() or [""])[0]


# -- how it stands -----------------------------------------------------------------------------------------------------


def _now(state: RunNow, step: int | None, now: float, recovers: bool) -> str:
    at = f" at step {step}" if step is not None else ""
    job = f"job {state.job}" if state.job and not state.job.startswith("local-") else "the job"
    if state.verdict is not None:
        reason = f": {state.verdict.reason}" if state.verdict.reason else ""
        ago = f", {seconds(now - state.verdict.time)} ago" if 0 < state.verdict.time < now else ""
        if state.verdict.verdict == "completed":
            return f"The run is complete{at}{reason}{ago}."
        return f"The run ended{at} with the verdict {state.verdict.verdict.replace('_', ' ')}{reason}{ago}."
    if state.state == "stale":
        return f"Nothing was heard of the run for {seconds(state.silent_s)}{at}; look whether {job} still runs."
    if state.status is None or state.state == "starting":
        how = "recovers from a fault" if recovers else "is starting"
        return f"The run {how}{at}: its ranks do not train yet."
    lost = [node.node for node in state.status.nodes if node.role == "lost"]
    rate = state.status.steps_per_s
    if state.status.stalled_s is not None:
        return f"The run stands still{at}: no step was done for {seconds(state.status.stalled_s)}."
    pace = f", {rate:.3g} steps/s" if rate and step is not None else ""
    gone = f"{names([printable(one, 60) for one in lost])} {'is' if len(lost) == 1 else 'are'} lost"
    missing = f"; {gone}" if lost else ""
    return f"The run trains{at}{pace}{missing}."


def _silence(events: Sequence[Event], state: RunNow) -> Iterator[str]:
    """Yield what the agents see of ranks that do no steps now."""
    if state.status is None or state.status.stalled_s is None or state.state != "running":
        return
    for event in reversed(events):
        if event.kind in ("goes_on", "recovered", "start"):
            return
        if event.kind == "hang":
            yield _sentence(words(event.kind, event.fields))
            return


def _layout(events: Sequence[Event]) -> Iterator[str]:
    """Yield the newest change of the layout that the planner chose."""
    for event in reversed(events):
        if event.kind == "layout" and Fields(event.fields).inner("before").data:
            yield _sentence(words(event.kind, event.fields))
            return


def _after(state: RunNow, events: Sequence[Event]) -> Iterator[str]:
    if state.verdict is None:
        return
    successor = _successor(events)
    if successor and _is_carried_on(state, events):
        yield f"Job {successor} carries it on by itself."
    committed = Fields(state.verdict.fields).whole("committed")
    if state.verdict.verdict != "completed":
        durable = f"step {committed}" if committed is not None and committed >= 0 else "none"
        yield f"The last durable step: {durable}."


def _is_carried_on(state: RunNow, events: Sequence[Event]) -> bool:
    return state.verdict is not None and state.verdict.verdict in _GOES_ON and bool(_successor(events))


def _successor(events: Sequence[Event]) -> str:
    for event in reversed(events):
        if event.kind == "successor" and event.fields.get("acted", True) is not False:
            return printable(Fields(event.fields).text("job"), 40)
        if event.kind == "launch":
            return ""
    return ""


# -- the fault ---------------------------------------------------------------------------------------------------------


def _broke(one: ChainRecovery, now: float) -> Iterator[str]:
    form = "%H:%M:%S" if 0 <= now - one.fault.time < 43_200 else "%Y-%m-%d %H:%M:%S"
    sign = one.sign
    if sign is None:
        said = f"{fault_words(one.fault.kind)}{f' on {printable(one.fault.node, 60)}' if one.fault.node else ''}"
    elif sign.kind == "rank_failed":
        said = rank_failed(Fields(sign.fields))
        if sign.fields.get("signal") is not None:  # else the error's own text may have these words
            said = said.replace(" killed by ", " was killed by ", 1)
    else:
        said = words(sign.kind, sign.fields).replace(" lost: silent", " was lost: it was silent", 1)
    yield f"At {local_time(one.fault.time, form)}, {_sentence(said, capital=False)}"
    if one.fault.drill:
        yield "It was made on purpose: a drill that a user had ordered."


def _sure(one: ChainRecovery) -> Iterator[str]:
    if one.fault.drill:
        return
    if one.confidence is not None and one.primary:
        yield _sentence(f"this is the root cause, {one.confidence:.0%} sure: {one.cause}")
    elif one.confidence is not None:
        yield _sentence(f"no end of that moment is known as the root cause; the likeliest: {one.cause}")
    elif one.fault.kind == "slow_start":
        pass
    elif one.ends > 1:
        yield f"It is the first of {one.ends} ends on record; no root cause was judged."
    else:
        yield "It is the only end of that moment on record, so it is the root cause."
    if one.echoes:
        yield f"Folded as its echoes: the errors of {plural(one.echoes, 'other rank')} that ended because of it."
    cause = class_of(one.failure_class)
    if cause is not CauseClass.UNKNOWN:
        yield f"It is {CLASSES[cause]}."


def _again(same: Sequence[ChainRecovery]) -> Iterator[str]:
    if same:
        yield f"The same had happened {plural(len(same), 'time')} before."


def _done(one: ChainRecovery) -> Iterator[str]:
    lost = one.fault.lost_steps
    again = ""
    if lost is not None and lost >= 0:
        again = f", with {plural(lost, 'step')} done again" if lost else ", and no step was lost"
        again += f" ({printable(one.fault.not_saved, 120)})" if lost and one.fault.not_saved else ""
    rung = printable(rung_words(one.fault.plan), 60) if one.fault.plan else ""
    did = f"The launcher decided to {rung}" if rung else "No step of recovery is on record"
    if one.outcome is RecoveryOutcome.AUTOMATIC:
        took = f" {seconds(one.down_s)} after the fault" if one.down_s is not None else ""
        yield f"{did}; training went on by itself{took}{again}."
    elif one.outcome is RecoveryOutcome.BY_HAND:
        took = f", {seconds(one.down_s)} after the fault" if one.down_s is not None else ""
        yield f"{did}; training went on in a job that was started by hand{took}{again}."
    elif one.outcome is RecoveryOutcome.UNDER_WAY:
        yield f"{did}; that is under way."
    elif one.outcome is RecoveryOutcome.NOT_NEEDED:
        yield "It held no ranks, so training went on."
    else:
        yield f"{did}; training did not go on."


def _to_do(one: ChainRecovery | None, state: RunNow) -> str:
    """Return what its user can do, where the fault still matters: the run ended by it, or it came again and again."""
    if one is None or one.outcome is not RecoveryOutcome.FAILED:
        return ""
    if state.verdict is not None and state.verdict.exit_code in (0, 75):
        return ""
    return shipped().todo[class_of(one.failure_class)]


def _sentence(text: str, capital: bool = True) -> str:
    clean = printable(text.strip(), _LONGEST).rstrip(".")
    return f"{clean[:1].upper() if capital else clean[:1]}{clean[1:]}."


# -- for programs ------------------------------------------------------------------------------------------------------


def why_object(why: RunWhy) -> dict[str, Any]:
    """Return the object of ``resilio why --json``; unknown values are null."""
    verdict = why.state.verdict
    return {
        "v": VERSION, "run_dir": str(why.path), "run_id": why.run_id, "time": why.now, "state": why.state.state,
        "verdict": asdict(verdict) if verdict is not None else None, "job": why.state.job or None, "step": why.step,
        "faults": why.faults, "same_before": why.again,
        "broke": recovery_object(why.broke) if why.broke is not None else None, "why": why.text,
        "to_do": why.to_do or None,
    }  # fmt: skip
