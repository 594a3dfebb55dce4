"""Where the last failure of a run began, from the events of its ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.diagnose.cascade.clocks import UNKNOWN_S
from resilio_hpc.diagnose.cascade.death import Death, death_of
from resilio_hpc.diagnose.cascade.verdict import CascadeVerdict, judge

PROGRESS = ("committed", "recovered", "first_step")


def last_origin(events: Iterable[Event]) -> CascadeVerdict | None:
    """Return the origin of the last round's ends; None without any, or where progress followed them.

    The controller's own verdict counts, which knew the ranks' calls. ``events`` by time.
    """
    deaths: list[Death] = []
    restarted: list[Death] = []  # the last one of a rank that runs again alone
    told: CascadeVerdict | None = None
    for event in events:
        f = Fields(event.fields)
        if event.kind in PROGRESS or event.kind in ("start", "launch"):
            deaths, restarted, told = [], [], None if event.kind in PROGRESS else told
        elif event.kind == "origin":
            deaths = []
            told = CascadeVerdict(
                -1, f.text("node"), _rank(f), f.data.get("primary") is True, f.number("confidence") or 0.0,
                f.text("evidence"),
            )  # fmt: skip
        elif event.kind == "rank_restarted":
            restarted = [death for death in deaths if death.rank == _rank(f)][-1:]
            deaths = [death for death in deaths if death.rank != _rank(f)]
        elif event.kind in ("rank_failed", "node_lost"):
            deaths.append(_death(event, f))
    if not deaths and told is None:
        deaths = restarted
    return judge(deaths) if deaths else told


def _death(event: Event, f: Fields) -> Death:
    if event.kind == "node_lost":
        return death_of(-1, f.text("node"), "node_lost", event.time - (f.number("silent_s") or 0.0))
    clock_s = f.number("uncertain_s")
    return death_of(
        _rank(f), f.text("node"), f.text("kind"), f.number("time") or event.time,
        UNKNOWN_S if clock_s is None else clock_s, f.whole("signal"), f.text("message"), f.text("traceback"), (),
        f.text("log"),
    )  # fmt: skip


def _rank(f: Fields) -> int:
    rank = f.whole("rank")
    return -1 if rank is None else rank
