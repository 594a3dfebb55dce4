"""The spans of one part of a run: what each moment between its beginning and its end was spent on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.causes import PartPhase, TimeCause, TimeSpan, covered
from resilio_hpc.report.accounting.part_facts import Moment, PartFacts, RoundFacts


@dataclass(frozen=True)
class _Window:
    """A time in which the ranks of a round make steps."""

    of: RoundFacts
    index: int  # of its round in the part
    begin: Moment
    end: Moment


class PartSpans:
    """Makes the spans of parts, the newest first: what lasts of a part depends on where later ones went on.

    ``steps_known``: ranks report their steps; without it, a round counts from the start of its ranks.
    """

    def __init__(self, steps_known: bool) -> None:
        self._steps_known = steps_known
        self._limit = float("inf")  # steps above it were or will be done again

    def of(self, part: PartFacts) -> list[TimeSpan]:
        """Return the spans of the part before the last one that was given, without a gap."""
        if self._limit == float("inf"):
            self._limit = part.final_step
        windows = self._windows(part)
        kept = [self._trained(part, window) for window in reversed(windows)][::-1]
        found: list[TimeSpan] = []
        at = part.began
        last: _Window | None = None
        for window, spans in zip(windows, kept, strict=True):
            phase = PartPhase.BETWEEN if last else PartPhase.STARTUP
            found += self._gap(part, at, window.begin, phase, last, window)
            found += spans
            at, last = window.end, window
        phase = PartPhase.CLOSING if last else PartPhase.STARTUP
        return found + self._gap(part, at, part.ended, phase, last, None)

    def _windows(self, part: PartFacts) -> list[_Window]:
        found: list[_Window] = []
        at = part.began
        for index, one in enumerate(part.rounds):
            first = self._begins(one)
            if first is None:
                continue
            begin = max(first, at, key=_us)
            begin = min(begin, part.ended, key=_us)
            following = part.rounds[index + 1].began if index + 1 < len(part.rounds) else None
            known = (one.failed, following, one.stopped, part.finished, part.ended)
            ends = [end for end in known if end is not None]
            end = max(begin, min(ends, key=_us), key=_us)
            found.append(_Window(one, index, begin, end))
            at = end
        return found

    def _begins(self, one: RoundFacts) -> Moment | None:
        if not self._steps_known:
            return one.started
        if one.first is not None or one.restores is None:
            return one.first
        # the line of the first step is lost: a commit of a later step shows that the ranks train
        return next((commit.at for commit in one.commits if commit.step > (one.restores or 0)), None)

    # -- training ------------------------------------------------------------------------------------------------------

    def _trained(self, part: PartFacts, window: _Window) -> list[TimeSpan]:
        one, begin, end = window.of, window.begin.us, window.end.us
        what = "ranks make steps" if self._steps_known else "ranks run; the script reports no steps"
        whole = TimeSpan(
            begin, end, TimeCause.TRAIN, f"round {one.number}: {what}", _lines(window.begin, window.end),
            part.key, one.number, PartPhase.TRAINING,
        )  # fmt: skip
        if begin == end:
            self._limit = min(self._limit, one.base)
            return []
        spans = covered([whole], _stalled(window))
        moving = [span for span in spans if span.cause is TimeCause.TRAIN]
        total = sum(span.us for span in moving)
        share = _kept(window, self._limit) if self._steps_known else 1.0
        keeps = min(total, round(share * total))
        self._limit = min(self._limit, one.base)
        spans = _with_repeated(spans, keeps, f"round {one.number}: steps that did not last", _lines(window.end))
        return _with_saves(spans, window)

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _gap(
        self, part: PartFacts, begin: Moment, end: Moment, phase: PartPhase, after: _Window | None,
        before: _Window | None,
    ) -> list[TimeSpan]:  # fmt: skip
        """Return the spans between two times in which steps are made, or before the first, or after the last."""
        if end.us <= begin.us:
            return []
        near = before or after
        spans = [TimeSpan(
            begin.us, end.us, *_ground(part, phase, after, before), _lines(begin, end), part.key,
            near.of.number if near else None, phase,
        )]  # fmt: skip
        until = before.of if before else None
        last = before.index + 1 if before else len(part.rounds)
        for index in range(after.index if after else 0, last):
            failed = part.rounds[index].failed
            if failed is not None and begin.us <= failed.us < end.us:
                spans = _with_failure(spans, part, index, end)
        if phase is PartPhase.CLOSING or (until is None and part.finished is not None):
            done = part.finished
            if done is not None and done.us < end.us:
                over = TimeSpan(
                    max(done.us, begin.us), end.us, TimeCause.IDLE, "the job closes after its verdict",
                    _lines(done, end),
                )  # fmt: skip
                spans = covered(spans, [over])
        if until is not None:
            spans = covered(spans, self._before_first_step(until, begin, end))
        return spans

    def _before_first_step(self, one: RoundFacts, begin: Moment, end: Moment) -> Iterator[TimeSpan]:
        if one.first is None and self._steps_known:  # its line is lost, so it is not known when the steps began
            since = max(begin.us, (one.ordered or one.began).us)
            yield TimeSpan(since, end.us, TimeCause.UNKNOWN, "the ledger has no line about the first step", _lines(end))
        elif one.first is not None and one.restore_us:
            since = max(begin.us, (one.ordered or one.began).us, end.us - one.restore_us)
            yield TimeSpan(since, end.us, TimeCause.LOAD, f"ranks restore step {one.restored}", _lines(one.first))


def _us(moment: Moment) -> int:
    return moment.us


def _lines(*moments: Moment) -> tuple[Event, ...]:
    found: list[Event] = []
    for moment in moments:
        if not any(moment.line is line for line in found):
            found.append(moment.line)
    return tuple(found)


def _ground(part: PartFacts, phase: PartPhase, after: _Window | None, before: _Window | None) -> tuple[TimeCause, str]:
    """Return cause and words of a gap, before its failures are laid over it."""
    if phase is PartPhase.STARTUP:
        return TimeCause.START, "the job starts" if part.launched else "a job starts, whose launch is not recorded"
    if phase is PartPhase.CLOSING:
        return TimeCause.IDLE, "the job closes"
    if after is not None and after.of.regrouped is not None:
        return TimeCause.START, "a planned change of the nodes"
    number = before.of.number if before is not None else "?"
    return TimeCause.START, f"round {number} starts; no failure is recorded"


def _with_failure(spans: list[TimeSpan], part: PartFacts, index: int, end: Moment) -> list[TimeSpan]:
    one = part.rounds[index]
    failed = one.failed
    assert failed is not None
    following = part.rounds[index + 1].began if index + 1 < len(part.rounds) else None
    following = following if following is not None and following.us > failed.us else None
    decided = one.decided if one.decided is not None and one.decided.us >= failed.us else following
    known = min(decided.us, end.us) if decided is not None else end.us
    over = [
        TimeSpan(
            failed.us, known, TimeCause.DETECT, f"round {one.number}: a failure, until the controller decides",
            _lines(failed, *((decided,) if decided is not None else ())),
        ),
    ]  # fmt: skip
    if decided is not None:
        over.append(TimeSpan(
            known, end.us, TimeCause.RECOVER, f"round {one.number}: what was decided is carried out",
            _lines(decided, end),
        ))  # fmt: skip
    return covered(spans, over)


def _stalled(window: _Window) -> Iterator[TimeSpan]:
    at = window.begin.us
    for stall in window.of.stalls:
        begin, end = max(stall.begin_us, at), int(min(stall.end_us, window.end.us))
        if end <= begin:
            continue
        why = "ranks pause for a test of their nodes" if stall.paused else "no step is done"
        lines = stall.lines if len(stall.lines) > 1 else (*stall.lines, window.end.line)
        yield TimeSpan(begin, end, TimeCause.STALLED, f"round {window.of.number}: {why}", lines)
        at = end


def _with_repeated(spans: list[TimeSpan], keeps: int, why: str, lines: tuple[Event, ...]) -> list[TimeSpan]:
    """Return the spans, with the training time after its first ``keeps`` microseconds as repeated."""
    found: list[TimeSpan] = []
    for span in spans:
        if span.cause is not TimeCause.TRAIN:
            found.append(span)
            continue
        kept = min(keeps, span.us)
        keeps -= kept
        if kept:
            found.append(replace(span, end_us=span.begin_us + kept))
        if kept < span.us:
            found.append(replace(
                span, begin_us=span.begin_us + kept, cause=TimeCause.REPEATED, why=why, lines=lines
            ))  # fmt: skip
    return found


def _with_saves(spans: list[TimeSpan], window: _Window) -> list[TimeSpan]:
    """Return the spans, with the time for which saves held up training.

    The ledger says how long a snapshot took, and when its step was committed: it is shown right before that.
    """
    trained = [span for span in spans if span.cause is TimeCause.TRAIN]
    return _spliced(spans, covered(trained, _saves(window)))


def _saves(window: _Window) -> Iterable[TimeSpan]:
    one, at = window.of, window.begin.us
    waits: list[TimeSpan] = []
    for commit in one.commits:
        if not commit.blocked_us:
            continue
        begin, end = max(at, commit.at.us - commit.blocked_us), min(commit.at.us, window.end.us)
        if end <= begin:
            continue
        waits.append(TimeSpan(
            begin, end, TimeCause.SAVE, f"round {one.number}: snapshot of step {commit.step}", _lines(commit.at)
        ))  # fmt: skip
        at = end
    if one.last_save is not None and one.last_save.us < window.end.us:
        since = one.last_save
        waits = [replace(wait, end_us=min(wait.end_us, since.us)) for wait in waits if wait.begin_us < since.us]
        waits.append(TimeSpan(
            max(since.us, window.begin.us), window.end.us, TimeCause.SAVE,
            f"round {one.number}: ranks have ended, the last checkpoint is being written", _lines(since, window.end),
        ))  # fmt: skip
    return waits


def _spliced(spans: list[TimeSpan], instead: list[TimeSpan]) -> list[TimeSpan]:
    """Return ``spans`` without those of training, and ``instead`` in their place, by time."""
    return sorted([*(span for span in spans if span.cause is not TimeCause.TRAIN), *instead],
                  key=lambda span: span.begin_us)  # fmt: skip


def _kept(window: _Window, limit: float) -> float:
    """Return the share of a round's time that made steps up to ``limit``."""
    one, begin, end = window.of, window.begin.us, window.end.us
    if one.reached is not None and limit >= one.reached:
        return 1.0
    if limit < one.first_step:
        return 0.0
    if one.reached is not None and one.reached > one.first_step:
        return (limit - one.first_step) / (one.reached - one.first_step)
    durable = next((commit.at.us for commit in one.commits if commit.step >= limit), end)
    return (min(max(durable, begin), end) - begin) / (end - begin) if end > begin else 1.0
