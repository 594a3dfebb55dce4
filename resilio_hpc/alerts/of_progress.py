"""Alerts on progress: goodput, life, news and steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from resilio_hpc.alerts.alert import Alert, Limits, fire
from resilio_hpc.alerts.run_facts import AlertFacts
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.events.phrases import seconds
from resilio_hpc.report.accounting.causes import US, PartPhase, TimeCause, TimeSpan, microseconds

LEAST_TOTAL_S = 600.0  # of job time, before goodput is judged: a start takes minutes
WINDOW_S = 300.0  # in which liveness is measured (OPS-6)
LEAST_WINDOW_S = 60.0  # of it that must be known
USEFUL = (TimeCause.TRAIN, TimeCause.SAVE)
_ALIVE = (TimeCause.TRAIN, TimeCause.SAVE, TimeCause.REPEATED, TimeCause.STALLED)


def _job_spans(facts: AlertFacts, window_s: float = 0.0) -> list[TimeSpan]:
    """Return the spans of jobs by time, those of the last ``window_s`` seconds; 0: of the whole run."""
    begin = microseconds(facts.until - window_s) if window_s else 0
    spans = sorted((span for part in facts.time.parts for span in part.spans), key=lambda span: span.begin_us)
    return [span for span in spans if span.end_us > begin]


def goodput_share(facts: AlertFacts, window_s: float = 0.0) -> float | None:
    """Return useful time / total time, 0 to 1, as ``resilio report`` has it; None where too little time has passed."""
    begin = microseconds(facts.until - window_s) if window_s else 0
    useful = total = 0
    for span in _job_spans(facts, window_s):
        length = span.end_us - max(span.begin_us, begin)
        total += length
        useful += length if span.cause in USEFUL else 0
    least = min(LEAST_TOTAL_S, window_s or LEAST_TOTAL_S)
    return useful / total if total >= least * US else None


def low_goodput(facts: AlertFacts, limits: Limits, window_s: float = 0.0) -> Iterator[Alert]:
    """Yield the alert where a run that is not over has low goodput. A share that is an upper bound counts, too."""
    share, limit = goodput_share(facts, window_s), limits["low_goodput"]
    if share is None or share >= limit or not facts.active:
        return
    lost = [span for span in _job_spans(facts, window_s) if span.cause not in USEFUL]
    longest = sorted(sorted(lost, key=lambda span: span.us)[-3:], key=lambda span: span.begin_us)
    bound = "" if facts.time.steps_known else "at most "
    most = _most(lost)
    text = f"goodput is {bound}{share:.1%}, below {limit:.0%}" + (f"; most was lost to {most}" if most else "")
    lines = [span.lines[0] for span in longest if span.lines]
    yield fire("low_goodput", _fell_below(facts, limit, window_s), text, limits, round(share, 4), lines)


def _most(lost: Iterable[TimeSpan]) -> str:
    sums: dict[str, int] = {}
    for span in lost:
        sums[span.cause.value] = sums.get(span.cause.value, 0) + span.us
    name = max(sums, key=lambda cause: sums[cause], default="")
    return f"{name} ({seconds(sums[name] / US)})" if name else ""


def _fell_below(facts: AlertFacts, limit: float, window_s: float) -> float:
    """Return when the share fell below the limit for the last time; of a window, its beginning at the earliest."""
    useful = total = 0.0
    spans = _job_spans(facts, window_s)
    since: float | None = None
    for span in spans:
        length = span.us / US
        if span.cause in USEFUL:
            useful += length
        elif since is None or useful >= limit * total:
            until = useful / limit - total if limit > 0 else length  # from the span's beginning
            since = span.begin_us / US + max(0.0, min(until, length))
        total += length
        if useful >= limit * total:
            since = None
    return since if since is not None else facts.until


def alive_share(facts: AlertFacts) -> tuple[float | None, list[TimeSpan]]:
    """Return the share of the last five minutes in which all ranks lived, and the spans in which some did not.

    The start of a job, its end, and the queue do not count. None where less than a minute is known.
    """
    if not facts.runs:
        return None, []
    begin = microseconds(facts.until - WINDOW_S)
    known = down = 0
    lost: list[TimeSpan] = []
    for span in facts.time.spans:
        length = span.end_us - max(span.begin_us, begin)
        if length <= 0 or span.phase not in (PartPhase.TRAINING, PartPhase.BETWEEN):
            continue
        known += length
        if span.cause not in _ALIVE:
            down += length
            lost.append(span)
    return (1 - down / known if known >= LEAST_WINDOW_S * US else None), lost


def not_alive(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where ranks were down for a part of the last five minutes."""
    share, lost = alive_share(facts)
    if share is None or share >= limits["not_alive"] or not lost:
        return
    down_s = sum(span.end_us - max(span.begin_us, microseconds(facts.until - WINDOW_S)) for span in lost) / US
    text = f"all ranks lived for {share:.1%} of the last five minutes: {seconds(down_s)} without"
    yield fire("not_alive", lost[0].begin_us / US, text, limits, round(share, 4), _lines(lost))


def _lines(spans: Iterable[TimeSpan]) -> list[Event]:
    return list({id(line): line for span in spans for line in span.lines}.values())


def no_news(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where a job that began has no verdict, and its files do not change any more."""
    silent_s, part = facts.state.silent_s, facts.part
    if facts.state.state != "stale" or silent_s is None or part is None or part.over is not None:
        return
    if silent_s <= limits["no_news"] or facts.next_job.endswith("(requeued)"):
        return
    text = f"job {facts.state.job or '?'} has no verdict, and nothing was heard of it for {seconds(silent_s)}"
    yield fire("no_news", facts.now - silent_s, text, limits, round(silent_s, 1), [part.ended.line])


def progressed_at(facts: AlertFacts) -> float | None:
    """Return when progress was last seen, in Unix seconds; None where the run tells of none.

    Progress is a first step of a round, a committed step, and a step further than an earlier check saw.
    """
    part = facts.part
    if part is None:
        return None
    newest, at = -1, None
    for event in facts.of_kind("first_step", "committed", "goes_on", since=part.began.us / US):
        step = Fields(event.fields).whole("step")
        if step is not None:
            newest, at = max(newest, step), event.time
    status = facts.state.status
    step = status.step if status is not None else None
    if step is not None and step > newest:
        is_same = facts.seen is not None and facts.seen.step == step
        at = facts.seen.time if is_same and facts.seen is not None else facts.now
    return at


def stalled(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where steps are overdue by the run's own limit, or no progress was seen for too long.

    A run that tells of no progress at all is not judged; one that has not begun to is judged from its job's start.
    """
    part, status = facts.part, facts.state.status
    if not facts.runs or part is None:
        return
    told = facts.of_kind("stalled", "goes_on", "paused", "round", since=part.began.us / US)
    newest = told[-1] if told else None
    if status is not None and status.stalled_s is not None:
        since, lines = facts.until - status.stalled_s, [newest] if newest and newest.kind == "stalled" else []
        text = f"no step for {seconds(status.stalled_s)}, longer than the run's own limit"
        yield fire("stalled", since, text, limits, round(status.stalled_s, 1), [line for line in lines if line])
        return
    at = progressed_at(facts)
    if at is None and any(event.kind == "first_step" for event in facts.events):
        at = part.began.us / US  # the jobs before did steps, and this one does not come to any
    if at is None:
        return
    age_s = facts.until - at
    if age_s > limits["stalled"]:
        lines = [event for event in facts.of_kind("first_step", "committed", "goes_on") if event.time <= at]
        text = f"no progress was seen for {seconds(age_s)}, while job {facts.state.job or '?'} runs"
        yield fire("stalled", at, text, limits, round(age_s, 1), lines[-1:])
