"""Every microsecond of a run's wall clock has one cause, whatever is missing, torn, or wrong in its ledger."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.report.accounting.causes import US, TimeCause, totals
from resilio_hpc.report.accounting.node_time import node_time
from resilio_hpc.report.accounting.part_facts import KINDS
from resilio_hpc.report.accounting.run_time import RunTime, run_time
from resilio_hpc.report.goodput import goodput
from tests.support.report.long_runs import LongRun, draw, write_run
from tests.support.simulator.run import simulate

# -- what is said of known ledgers -------------------------------------------------------------------------------------


def event(at: float, kind: str, job: str = "7", /, **fields: Any) -> Event:
    return Event(at, f"{job}-n1", kind, fields)


def launch(at: float, job: str = "7", nodes: Sequence[str] = ("n1", "n2", "n3")) -> Event:
    return Event(at, f"{job}-supervisor-main", "launch", {"job": job.partition("r")[0], "nodes": list(nodes)})


def ends(at: float, job: str = "7", **fields: Any) -> list[Event]:
    return [event(at, "verdict", job, **({"verdict": "completed"} | fields)), event(at + 1, "launch_ends", job)]


def heard_of(part: str, heard: float) -> Event:
    return Event(130, f"{part}r1-supervisor-main", "predecessor", {"job": part, "part": part, "heard": heard})


def round_(at: float, number: int, job: str = "7") -> Event:
    return event(at, "round", job, round=number, members=["n1", "n2"])


def first(at: float, number: int, step: int, restored: int = -1, job: str = "7", **fields: Any) -> Event:
    return event(at, "first_step", job, round=number, step=step, restored=restored, **fields)


BEGUN = [launch(0), round_(2, 0), first(10, 0, 1)]

CASES: dict[str, tuple[list[Event], dict[str, float]]] = {
    "a save holds training up": (
        [*BEGUN, event(50, "committed", step=40, blocked_s=2.5), *ends(110)],
        {"start": 10, "train": 97.5, "save": 2.5, "idle": 1},
    ),
    "a restore is part of a recovery": (
        [*BEGUN, event(60, "rank_failed", round=0, node="n2", rank=3), event(61, "decision", round=0), round_(61, 1),
         event(62, "ranks_started", round=1), first(70, 1, 51, 50, restore_s=3.0),
         event(70, "recovered", round=1, lost_steps=0, restored=50), *ends(110)],
        {"start": 10, "train": 90, "detect": 1, "recover": 6, "load": 3, "idle": 1},
    ),
    "steps that did not last are the last ones of their round": (
        [*BEGUN, event(61, "rank_failed", round=0, node="n2", rank=3), event(61, "decision", round=0), round_(61, 1),
         first(70, 1, 42, 41), event(70, "recovered", round=1, lost_steps=10, restored=41), *ends(110)],
        {"start": 10, "train": 80.8, "repeated": 10.2, "recover": 9, "idle": 1},
    ),
    "a rank that starts again alone stops no other": (
        [*BEGUN, event(60, "rank_failed", round=0, node="n2", rank=3, alone=True),
         event(61, "decision", round=0, rung="restart_rank"), event(62, "rank_restarted", round=0, rank=3), *ends(110)],
        {"start": 10, "train": 100, "idle": 1},
    ),
    "ranks that cannot start again alone": (
        [*BEGUN, event(60, "rank_failed", round=0, node="n2", rank=3, alone=True), event(61, "restarts_all", round=0),
         event(61, "decision", round=0, rung="restart"), round_(61, 1), first(70, 1, 52, 51), *ends(110)],
        {"start": 10, "train": 91, "recover": 9, "idle": 1},
    ),
    "a silent node is detected from its last sign of life on": (
        [*BEGUN, event(65, "node_lost", node="n2", silent_s=5.0), event(65, "decision", round=0), round_(65, 1),
         first(70, 1, 51, 50), event(70, "recovered", round=1, lost_steps=0, restored=50), *ends(110)],
        {"start": 10, "train": 90, "detect": 5, "recover": 5, "idle": 1},
    ),
    "a fault during a recovery": (
        [*BEGUN, event(60, "rank_failed", round=0, node="n2", rank=3), event(61, "decision", round=0), round_(61, 1),
         event(65, "rank_failed", round=1, node="n2", rank=3), event(67, "decision", round=1), round_(67, 2),
         first(70, 2, 51, 50), event(70, "recovered", round=2, lost_steps=0, restored=50), *ends(110)],
        {"start": 10, "train": 90, "detect": 3, "recover": 7, "idle": 1},
    ),
    "a planned change of nodes is no failure": (
        [*BEGUN, event(59, "regroup", round=0, reason="grow"), round_(60, 1), first(65, 1, 51, 50), *ends(110)],
        {"start": 15, "train": 95, "idle": 1},
    ),
    "the last checkpoint is awaited": (
        [*BEGUN, event(100, "last_save", step=90), event(108, "committed", step=90), *ends(110)],
        {"start": 10, "train": 90, "save": 10, "idle": 1},
    ),
    "an agreed stop ends training when its step is committed": (
        [*BEGUN, event(100, "stop_agreed", step=91), event(101, "committed", step=90),
         event(102, "committed", step=91), *ends(110, verdict="time_limit", committed=91)],
        {"start": 10, "train": 92, "idle": 9},
    ),
    "the queue between two jobs": (
        [*BEGUN, *ends(110, verdict="time_limit", committed=100), launch(211, "8"), round_(212, 1, "8"),
         first(215, 1, 101, 100, "8"), *ends(300, "8")],
        {"start": 14, "train": 185, "idle": 2, "queue": 100},
    ),
    "a job that ends without a word: what follows is unknown": (
        [*BEGUN, event(100, "committed", step=90), launch(200, "8"), round_(201, 1, "8"),
         first(205, 1, 91, 90, "8"), *ends(300, "8")],
        {"start": 15, "train": 185, "idle": 1, "unknown": 100},
    ),
    "a requeued job is launched again under its number": (
        [*BEGUN, *ends(110, verdict="terminated", committed=100), launch(211, "7r1"), round_(212, 1, "7r1"),
         first(215, 1, 101, 100, "7r1"), *ends(300, "7r1")],
        {"start": 14, "train": 185, "idle": 2, "queue": 100},
    ),
    "jobs that overlap: training counts, not the start beside it": (
        [*BEGUN, launch(100, "8"), *ends(110, verdict="time_limit", committed=100), round_(112, 1, "8"),
         first(120, 1, 101, 100, "8"), *ends(200, "8")],
        {"start": 20, "train": 180, "idle": 1},
    ),
    "the line of a first step is lost": (
        [launch(0), round_(2, 0), first(10, 0, 1), event(60, "rank_failed", round=0, node="n2"),
         event(61, "decision", round=0), round_(61, 1), event(62, "start", round=1, restore="memory:50"),
         event(62, "ranks_started", round=1), event(62, "committed", step=50), event(80, "committed", step=60),
         *ends(110)],
        {"start": 10, "train": 80, "detect": 1, "recover": 1, "unknown": 18, "idle": 1},
    ),
    "lines of a job whose launch is lost are no queue": (
        [*BEGUN, *ends(110, verdict="time_limit", committed=100), event(130, "round", "8", round=1, members=[]),
         event(180, "committed", "8", step=120), launch(211, "9"), round_(212, 2, "9"),
         first(215, 2, 121, 120, "9"), *ends(300, "9")],
        {"start": 14, "train": 185, "idle": 2, "queue": 50, "unknown": 50},
    ),
    "a requeued job whose last sign the next part found": (
        [*BEGUN, event(50, "committed", step=40), heard_of("7", 60.5), launch(131, "7r1"), round_(132, 1, "7r1"),
         first(140, 1, 41, 40, "7r1"), *ends(200, "7r1")],
        {"start": 20, "train": 60 + 40, "repeated": 10.5, "queue": 69.5, "idle": 1},
    ),
    "a last sign that is older than the last line says nothing": (
        [*BEGUN, event(50, "committed", step=40), heard_of("7", 45.0), launch(131, "7r1"), round_(132, 1, "7r1"),
         first(140, 1, 41, 40, "7r1"), *ends(200, "7r1")],
        {"start": 20, "train": 60 + 40, "unknown": 80, "idle": 1},
    ),
    "a last sign from the time of the next part is another's": (
        [*BEGUN, event(50, "committed", step=40), heard_of("7", 135.0), launch(131, "7r1"), round_(132, 1, "7r1"),
         first(140, 1, 41, 40, "7r1"), *ends(200, "7r1")],
        {"start": 20, "train": 60 + 40, "unknown": 80, "idle": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_time_was_spent_on(name: str) -> None:
    events, expected = CASES[name]
    time = run_time(sorted(events, key=lambda one: one.time))
    found = {cause.value: us / US for cause, us in totals(time.spans).items() if us}
    assert found == pytest.approx(expected)
    check(time)


def test_a_line_with_a_wild_time_is_left_out_and_its_moment_is_unknown() -> None:
    lines = [*BEGUN, event(50, "committed", step=40), event(9e8, "committed", step=50), event(70, "committed", step=60),
             *ends(110)]  # fmt: skip
    events = [replace(one, file="7.jsonl", line=number + 1) for number, one in enumerate(lines)]
    time = run_time(sorted(events, key=lambda one: one.time))
    sums = totals(time.spans)
    assert (time.wall_us, sums[TimeCause.UNKNOWN], sums[TimeCause.TRAIN]) == (111 * US, 20 * US, 80 * US)
    unknown = next(span for span in time.spans if span.cause is TimeCause.UNKNOWN)
    assert [line.line for line in unknown.lines] == [4, 5, 6]


def test_nodes_without_ranks_are_idle_and_joined_nodes_count_until_they_leave() -> None:
    joins = Event(30, "9-joiner-main", "joins", {"part": "7", "nodes": ["n4"]})
    leaves = Event(50, "9-joiner-main", "joiner_ends", {"part": "7"})
    time = run_time(sorted([*BEGUN, joins, leaves, *ends(110)], key=lambda one: one.time))
    nodes = node_time(time)
    assert nodes.names == ("n1", "n2", "n3", "n4")
    assert nodes.us == (3 * 111 + 20) * US
    # the spare from the round on, the joined node, and all three while the job closes
    assert nodes.by_cause[TimeCause.IDLE] == (108 + 20 + 3) * US
    assert nodes.by_cause[TimeCause.TRAIN] == 2 * 100 * US


# -- any ledger --------------------------------------------------------------------------------------------------------


def check(time: RunTime) -> None:
    """The spans cover the wall clock once; so do those of each job; goodput has the same sums."""
    for spans in (time.spans, *(part.spans for part in time.parts)):
        assert all(span.us > 0 and span.lines for span in spans)
        assert [one.end_us for one, _ in pairwise(spans)] == [other.begin_us for _, other in pairwise(spans)]
    assert sum(totals(time.spans).values()) == time.wall_us
    edges = [edge for part in time.parts if part.spans for edge in (part.facts.began.us, part.facts.ended.us)]
    assert time.wall_us == (max(edges) - min(edges) if edges else 0)
    nodes = node_time(time)
    assert nodes.us == sum(
        len(span.nodes) * (span.end_us - span.begin_us) for span in nodes.spans if span.held
    )  # fmt: skip


_KINDS = sorted(KINDS)
_NODES = st.sampled_from(["n1", "n2", "n3"])
_ANY = st.one_of(st.none(), st.integers(-3, 60), st.floats(-5, 50), st.text(max_size=3), st.just([]))
_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "round": st.one_of(st.integers(0, 4), _ANY), "step": st.one_of(st.integers(0, 60), _ANY),
        "restored": st.one_of(st.integers(-1, 60), _ANY), "lost_steps": st.one_of(st.integers(0, 30), _ANY),
        "members": st.lists(_NODES, max_size=3), "nodes": st.lists(_NODES, max_size=3), "node": _NODES,
        "job": st.sampled_from(["7", "8"]), "silent_s": _ANY, "blocked_s": _ANY, "restore_s": _ANY,
        "verdict": st.sampled_from(["completed", "time_limit", ""]), "committed": _ANY, "part": st.just("7"),
        "restore": st.sampled_from(["", "memory:5", "committed:x", "memory:99999999999999999999"]),
    },
)  # fmt: skip
_EVENTS = st.builds(
    Event, st.floats(0, 500),
    st.sampled_from(["7-supervisor-main", "7-n1", "8-supervisor-main", "8-n2", "7r1-n1", "?"]),
    st.sampled_from(_KINDS), _FIELDS,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(_EVENTS, max_size=40), st.one_of(st.none(), st.floats(0, 900)))
def test_any_events_are_accounted_for(events: list[Event], now: float | None) -> None:
    found = sorted(events, key=lambda one: one.time)
    check(run_time(found, now))
    whole = goodput(found, now)
    parts = (whole.useful_s, whole.redone_s, whole.startup_s, whole.recovery_s, whole.closing_s, whole.stalled_s,
             whole.unknown_s)  # fmt: skip
    assert sum(parts) == pytest.approx(whole.total_s, abs=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_ledgers_of_the_real_control_plane_are_accounted_for(seed: int) -> None:
    """The simulator's faults strike the real controllers and agents, which write the ledger."""
    told = sorted(simulate(seed, tell=True).ledger, key=lambda one: one[0])
    events = [launch(told[0][0]), *(event(at, kind, **fields) for at, kind, fields in told if kind in KINDS)]
    time = run_time(events)
    check(time)
    sums = totals(time.spans)
    assert sums[TimeCause.UNKNOWN] == sums[TimeCause.QUEUE] == 0
    trained = any(one.kind == "first_step" for one in events)
    assert trained or sums[TimeCause.TRAIN] + sums[TimeCause.REPEATED] + sums[TimeCause.STALLED] == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("any") / "run", LongRun(4, 2.0, 60, job_hours=12.0))


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_ledger_is_accounted_for(run: Path, seed: int, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    (tmp_path / "ledger").mkdir()
    for file in sorted((run / "ledger").iterdir()):
        lines = file.read_bytes().splitlines(keepends=True)
        for _ in range(random_.randrange(1 + min(40, len(lines)))):
            _damage(lines, random_)
        (tmp_path / "ledger" / file.name).write_bytes(b"".join(lines))
    time = run_time(read_ledger(tmp_path / "ledger", KINDS))
    check(time)
    assert time.wall_us < 8 * 86_400 * US  # two days of run, three of a clock that was wrong at an end
    assert totals(time.spans)[TimeCause.TRAIN] > 0


def _damage(lines: list[bytes], random_: random.Random) -> None:
    """Lose a line, tear it, cut the file, or set the clock for some lines."""
    if not lines:
        return
    number = random_.randrange(len(lines))
    what = random_.random()
    if what < 0.4:
        del lines[number]
    elif what < 0.8:
        lines[number] = lines[number][: random_.randrange(1 + len(lines[number]))]
    elif what < 0.85:
        del lines[max(1, len(lines) - random_.randrange(20)) :]
    else:
        by = random_.choice((-86_400 * 3, -3600, 3600, 86_400 * 3))
        for index in range(number, min(len(lines), number + random_.randrange(1, 6))):
            head, found, rest = lines[index].partition(b'"time":')
            at, comma, rest = rest.partition(b",")
            if found and comma and at:
                lines[index] = head + found + str(float(at) + by).encode() + comma + rest


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_goodput_is_what_was_put_into_a_long_run(seed: int, tmp_path: Path) -> None:
    run = LongRun(8, 6.0, 200, seed=seed)
    draw(run)
    time = run_time(read_ledger(write_run(tmp_path / "run", LongRun(8, 6.0, 200, seed=seed)) / "ledger", KINDS))
    assert time.goodput is not None
    assert time.goodput == pytest.approx(run.useful_s * US / time.jobs_us, abs=0.005)
    assert totals(time.spans)[TimeCause.UNKNOWN] == 0
