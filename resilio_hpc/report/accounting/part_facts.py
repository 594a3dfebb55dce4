"""The facts of each part of a run, from its ledger. A part is one launch's turn to carry the run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.events.rungs import Rung
from resilio_hpc.report.accounting.causes import microseconds

_SUPERVISOR = "-supervisor-"
OPEN = math.inf  # the end of what goes on

KINDS = frozenset({
    "launch", "launch_ends", "verdict", "round", "start", "first_step", "rank_failed", "restarts_all",
    "node_lost",
    "agent_ended", "agent_left", "decision", "stalled", "goes_on", "paused", "pause_ended", "committed", "stop_agreed",
    "last_save", "recovered", "agent", "controller", "joins", "joiner_ends", "node_left_job", "regroup",
    "predecessor",
})  # fmt: skip

_AGENT_ENDS = ("agent_ended", "agent_left")

# Nodes write it for each round. It is needed only of a script that reports no steps.
OF_STARTS = "ranks_started"


@dataclass(frozen=True)
class Moment:
    """A moment, and the ledger line that tells it."""

    us: int
    line: Event


@dataclass(frozen=True)
class Stall:
    """Ranks lived and made no steps. ``end_us``: OPEN where it lasts until the round's end."""

    begin_us: int
    end_us: float
    lines: tuple[Event, ...]
    paused: bool


@dataclass(frozen=True)
class CommitFact:
    """A committed step. ``blocked_us``: how long training waited for its snapshot, None where not known."""

    at: Moment
    step: int
    blocked_us: int | None


@dataclass
class RoundFacts:
    """One life of all ranks. ``restores``: the step from which its ranks go on, -1: none, None: not known."""

    number: int
    members: tuple[str, ...]
    began: Moment
    ordered: Moment | None = None  # its ranks are to start
    started: Moment | None = None  # the last node's ranks run
    first: Moment | None = None  # all ranks have done their first step
    first_step: int = 0
    restored: int = 0
    restores: int | None = None
    restore_us: int = 0
    failed: Moment | None = None
    decided: Moment | None = None
    regrouped: Moment | None = None
    reached: int | None = None  # the last step that is known to be done
    stop_step: int | None = None  # on which all ranks agreed as their last one
    stopped: Moment | None = None  # it is committed
    last_save: Moment | None = None
    commits: list[CommitFact] = field(default_factory=list)
    stalled_step: int = 0
    stalls: list[Stall] = field(default_factory=list)

    @property
    def base(self) -> int:
        """Return the step from which its ranks went on; 0 where that is not known."""
        return self.restored if self.first is not None else max(0, self.restores or 0)


@dataclass
class PartFacts:
    """A part of the run. ``nodes``: of its launch; ``moves``: (when, node, whether it came) after that.

    ``heard``: when its controller's status was written last, as the next part found it.
    """

    key: str
    job: str
    began: Moment
    ended: Moment
    nodes: tuple[str, ...] = ()
    moves: list[tuple[int, str, bool]] = field(default_factory=list)
    launched: bool = False
    over: Moment | None = None  # its launch's end
    finished: Moment | None = None  # its verdict
    heard: Moment | None = None
    final_step: float = math.inf  # the last durable step, where it did not complete the run
    rounds: list[RoundFacts] = field(default_factory=list)
    numbered: dict[int, list[RoundFacts]] = field(default_factory=dict)
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by the joiner that writes


def parts_of(events: Sequence[Event]) -> tuple[list[PartFacts], list[Event]]:
    """Return the parts by their beginnings, and the events that belong to none. ``events`` by time."""
    keys = {_key(event): Fields(event.fields).text("job") for event in events if event.kind == "launch"}
    keys = _of_agents(events) | keys
    owners: dict[str, str | None] = {}
    parts: dict[str, PartFacts] = {}
    strays: list[Event] = []
    for event in events:
        key = _owner(event, keys, owners)
        if key is None:
            strays.append(event)
            continue
        at = Moment(microseconds(event.time), event)
        part = parts.get(key)
        if part is None:
            part = parts[key] = PartFacts(key, keys.get(key, ""), at, at)
        if at.us > part.ended.us:
            part.ended = at
        _note(part, at, Fields(event.fields))
        if event.kind == "predecessor":
            _note_last_sign(parts, at, Fields(event.fields))
    return sorted(parts.values(), key=lambda part: part.began.us), strays


def _note_last_sign(parts: dict[str, PartFacts], at: Moment, f: Fields) -> None:
    """Take note until when the part before is known to have run, where it ended without a word."""
    before, heard = parts.get(f.text("part")), f.number("heard")
    if before is None or before.over is not None or heard is None or not before.ended.us < heard * 1e6 < at.us:
        return
    before.heard = before.ended = Moment(microseconds(heard), at.line)


def _of_agents(events: Iterable[Event]) -> dict[str, str]:
    """Return the parts that agents are of: the line of a launch may be lost."""
    found: dict[str, str] = {}
    for event in events:
        node = f"-{Fields(event.fields).text('node')}"
        if event.kind in ("agent", "controller") and len(node) > 1 and event.writer.endswith(node):
            found[event.writer.removesuffix(node)] = ""
    return found


def _key(event: Event) -> str:
    """Return the part of a launch: a job that Slurm requeues is launched again, under the same number."""
    key, found, _ = event.writer.partition(_SUPERVISOR)
    return key if found else Fields(event.fields).text("job")


def _owner(event: Event, keys: Iterable[str], owners: dict[str, str | None]) -> str | None:
    if event.kind in ("agent", "controller", "joins", "joiner_ends") and Fields(event.fields).text("part") in set(keys):
        owners[event.writer] = Fields(event.fields).text("part")
    if event.writer not in owners:
        fitting = [key for key in keys if event.writer.startswith(f"{key}-")]
        owners[event.writer] = max(fitting, key=len, default=None if keys else "")
    return owners[event.writer]


def _note(part: PartFacts, at: Moment, f: Fields) -> None:
    kind, number = at.line.kind, f.whole("round")
    if kind == "launch":
        part.launched = True
        part.nodes = tuple(dict.fromkeys((*part.nodes, *f.texts("nodes"))))
    elif kind == "round" and number is not None:
        part.rounds.append(RoundFacts(number, f.texts("members"), at))
        part.numbered.setdefault(number, []).append(part.rounds[-1])
    elif kind == "launch_ends":
        part.over = at
    elif kind == "verdict":
        part.over, part.finished = part.over or at, part.finished or at
        committed = f.whole("committed")
        if f.text("verdict") != "completed" and committed is not None and committed >= 0:
            part.final_step = committed
    elif kind == "joins":
        part.joined[at.line.writer] = f.texts("nodes")
        part.moves += [(at.us, node, True) for node in f.texts("nodes")]
    elif kind == "joiner_ends":
        part.moves += [(at.us, node, False) for node in part.joined.get(at.line.writer, ())]
    elif kind == "node_left_job":
        part.moves.append((at.us, f.text("node"), False))
    elif part.rounds:
        _note_round(part, part.rounds[-1], at, f)


def _note_round(part: PartFacts, current: RoundFacts, at: Moment, f: Fields) -> None:
    kind, number = at.line.kind, f.whole("round")
    same = number == current.number
    if kind == "start" and same:
        current.ordered = at
        _, _, step = f.text("restore").partition(":")
        current.restores = int(step) if step.isdigit() and step.isascii() and len(step) < 19 else -1
    elif kind == "ranks_started" and same:
        current.started = at
    elif kind == "first_step" and same:
        current.first = at
        current.first_step, current.restored = f.whole("step") or 0, max(f.whole("restored") or 0, 0)
        if f.has("restored") and (f.whole("restored") or 0) >= 0:
            current.restore_us = _length(f.number("restore_s"))
    elif kind == "rank_failed" and number is not None and f.data.get("alone") is not True:
        for one in part.numbered.get(number, ()):
            _fail(one, at)
    elif kind == "node_lost" and f.text("node") in current.members:
        _fail(current, Moment(at.us - _length(f.number("silent_s")), at.line))
    elif same if kind == "restarts_all" else kind in _AGENT_ENDS and f.text("node") in current.members:
        _fail(current, at)
    elif kind == "decision" and f.text("rung") != Rung.RESTART_RANK.value:
        failed = next((one for one in reversed(part.rounds) if one.failed and one.number == number), current)
        failed.decided = failed.decided or at
    elif kind == "regroup":
        current.regrouped = at
    elif kind in ("stalled", "paused") and same:
        silent = _length(f.number("silent_s")) if kind == "stalled" else 0
        current.stalls.append(Stall(at.us - silent, OPEN, (at.line,), kind == "paused"))
        current.stalled_step = f.whole("step") or 0
    elif kind in ("goes_on", "pause_ended") and same and current.stalls:
        _end_stall(current, at)
    elif kind == "committed":
        _note_commit(current, at, f)
    elif kind == "last_save":
        current.last_save = at
    elif kind == "stop_agreed":
        current.reached = current.stop_step = f.whole("step")
    elif kind == "recovered" and f.whole("lost_steps") is not None:
        before = (one for one in reversed(part.rounds) if one.number < (number or 0) and one.first is not None)
        if (last := next(before, None)) is not None:
            last.reached = (f.whole("lost_steps") or 0) + max(f.whole("restored") or 0, 0)


def _note_commit(current: RoundFacts, at: Moment, f: Fields) -> None:
    step, blocked = f.whole("step") or 0, f.number("blocked_s")
    if current.stalls and current.stalls[-1].end_us == OPEN and step > current.stalled_step:
        _end_stall(current, at)  # the steps go on, which another controller saw
    if current.stop_step is not None and step >= current.stop_step:
        current.stopped = current.stopped or at
    current.commits.append(CommitFact(at, step, None if blocked is None else _length(blocked)))


def _end_stall(current: RoundFacts, at: Moment) -> None:
    last = current.stalls[-1]
    current.stalls[-1] = Stall(last.begin_us, at.us, (*last.lines[:1], at.line), last.paused)


def _fail(one: RoundFacts, at: Moment) -> None:
    if one.failed is None or at.us < one.failed.us:
        one.failed = at


def _length(seconds: float | None) -> int:
    return max(0, microseconds(min(seconds or 0.0, 1e9)))
