"""The faults of a run, from its ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.events.drill_marks import DrillMarks
from resilio_hpc.events.event_text import words
from resilio_hpc.events.rungs import Rung


@dataclass(frozen=True)
class RunFault:
    """One fault: from its first sign until all ranks made a step again (or never did). Times in Unix seconds.

    ``kind``: rank_killed, rank_exception, early_exit, restore_failed, spawn, store_lost, spawner_lost, node_lost,
    spare_lost, agent_lost, controller_lost or slow_start. ``rank`` is None where no single rank is to blame, ``node``
    is "" where no node is. ``recovery_s``: from the fault (a silent node's last beat) to the first step of all ranks,
    or to their start where a script reports no steps. ``detection_s``: the part of it until the controller knew.
    None: not known. ``plan`` is a rung of the recovery ladder. ``drill``: what a user did on purpose; "": no drill.
    ``not_saved``: why the last finished step was not saved; "": it was, or that is not known.
    """

    kind: str
    node: str
    rank: int | None
    time: float
    recovered: bool
    recovery_s: float | None = None
    detection_s: float | None = None
    lost_steps: int | None = None
    plan: str = ""
    round: int | None = None
    message: str = ""
    drill: str = ""
    not_saved: str = ""


@dataclass(frozen=True)
class _Sign:
    kind: str
    node: str
    rank: int | None
    time: float
    round: int | None
    message: str
    detection_s: float | None = None
    weak: bool = False  # tells little beside another sign


@dataclass
class _Failure:
    signs: list[_Sign] = field(default_factory=list)
    plan: str = ""
    decided: float | None = None
    not_saved: str = ""

    def main(self) -> _Sign | None:
        """Return the sign to tell of: a lost node explains failed ranks, a signal explains broken connections."""
        order = {"node_lost": 0, "rank_killed": 1}
        return min(self.signs, key=lambda sign: (sign.weak, order.get(sign.kind, 2), sign.time), default=None)


def faults(events: Iterable[Event]) -> list[RunFault]:
    """Return all faults, by time. ``events`` by time, of all writers and jobs (``read_ledger``)."""
    return _Reader().read(events)


class _Reader:
    def __init__(self) -> None:
        self._found: list[RunFault] = []
        self._failure = _Failure()
        self._drills = DrillMarks()
        self._alone: dict[int, list[_Sign]] = {}  # of ranks that failed while the round goes on
        self._members: Sequence[str] = ()
        self._stopping = False
        self._job = ""

    def read(self, events: Iterable[Event]) -> list[RunFault]:
        for event in events:
            f = Fields(event.fields)
            if event.kind == "round":
                self._members = f.texts("members")
            elif event.kind == "launch" and f.text("job") != self._job:  # the job before ended without a verdict
                self._close(recovered=False)
                self._job, self._members, self._stopping = f.text("job"), (), False
            elif event.kind == "stopping":
                self._stopping = True
            elif event.kind == "rank_restarted":
                self._restarted(f)
            elif event.kind == "decision" and f.text("rung") != Rung.RESTART_RANK.value:
                self._failure.plan = f.text("rung")
                self._failure.decided = self._failure.decided or event.time
            elif event.kind == "last_step" and (f.whole("step") or 0) < 0:
                self._failure.not_saved = self._failure.not_saved or f.text("why")
            elif event.kind == "recovered":
                self._recovered(event.time, f)
            elif event.kind == "verdict":
                self._close(recovered=f.text("verdict") == "completed", first=f.inner("first_failure"))
                self._members = ()
            else:
                self._sign(event, f)
            self._drills.take(event)
        self._close(recovered=False)
        return sorted(self._found, key=lambda fault: fault.time)

    def _sign(self, event: Event, f: Fields) -> None:
        node, silent = f.text("node"), f.number("silent_s")
        if event.kind == "node_lost" and self._members and node not in self._members:
            lost_at = event.time - (silent or 0.0)
            self._found.append(RunFault("spare_lost", node, None, lost_at, True, detection_s=silent))
            return
        sign = _sign_of(event, f)
        if sign is not None and sign.rank is not None and f.data.get("alone") is True:
            self._alone.setdefault(sign.rank, []).append(sign)
        if sign is None or self._stopping or (sign.weak and node not in self._members):
            return
        self._failure.signs.append(sign)

    def _restarted(self, f: Fields) -> None:
        """Take note of a rank that runs again alone: the run went on.

        A rank may fail again before it is on record that it runs, so the oldest failure is the one that is over.
        """
        waiting = self._alone.get(f.whole("rank") or 0)
        if not waiting:
            return
        sign = waiting.pop(0)
        if sign in self._failure.signs:
            self._failure.signs.remove(sign)
        self._found.append(
            RunFault(
                sign.kind, sign.node, sign.rank, sign.time, True, recovery_s=f.number("seconds"),
                plan=Rung.RESTART_RANK.value, round=sign.round, message=sign.message,
                drill=self._drill([sign], sign.node, sign.time),
            )
        )  # fmt: skip

    def _recovered(self, at: float, f: Fields) -> None:
        failure, self._failure = self._failure, _Failure()
        recovery = f.number("recovery_s")
        kind = f.text("kind", "unknown")
        main = next((sign for sign in failure.signs if sign.kind == kind), failure.main())
        began = min((sign.time for sign in failure.signs), default=at - (recovery or 0.0))
        self._found.append(
            RunFault(
                kind=kind,
                node=f.text("node") or (main.node if main else ""),
                rank=f.whole("rank"),
                time=began,
                recovered=True,
                recovery_s=recovery,
                detection_s=f.number("detection_s") if f.has("detection_s") else _detection(failure, main),
                lost_steps=f.whole("lost_steps"),
                plan=f.text("plan") or failure.plan,
                round=main.round if main else None,
                message=main.message if main else "",
                not_saved=failure.not_saved if f.whole("lost_steps") else "",
                drill=self._drill(failure.signs, f.text("node") or (main.node if main else ""), began),
            )
        )

    def _close(self, recovered: bool, first: Fields | None = None) -> None:
        failure, self._failure = self._failure, _Failure()
        main = failure.main()
        if main is None:
            return
        blamed = (first.text("node"), first.whole("rank")) if first is not None else None
        main = next((sign for sign in failure.signs if (sign.node, sign.rank) == blamed), main)
        began = min(sign.time for sign in failure.signs)
        self._found.append(
            RunFault(
                main.kind, main.node, main.rank, began, recovered, detection_s=_detection(failure, main),
                plan=failure.plan, round=main.round, message=main.message,
                drill=self._drill(failure.signs, main.node, began),
            )
        )  # fmt: skip

    def _drill(self, signs: Sequence[_Sign], node: str, began: float) -> str:
        """Return what was done on purpose to a node of this failure, which began then; "" where nothing was."""
        nodes = {node, *(sign.node for sign in signs)}
        found = next((mark for mark in (self._drills.of(one, began) for one in nodes) if mark is not None), None)
        return found.fault if found is not None else ""


def _sign_of(event: Event, f: Fields) -> _Sign | None:
    node, number = f.text("node"), f.whole("round")
    text = words(event.kind, event.fields)
    if event.kind == "rank_failed":
        kind = {"signal": "rank_killed", "exit": "rank_exception"}.get(f.text("kind"), f.text("kind", "unknown"))
        return _Sign(kind, node, f.whole("rank"), event.time, number, text)
    if event.kind == "node_lost":
        silent = f.number("silent_s")
        return _Sign("node_lost", node, None, event.time - (silent or 0.0), number, text, silent)
    if event.kind == "agent_ended":
        return _Sign("agent_lost", node, None, event.time, number, text, weak=True)
    if event.kind == "agent_left":
        return _Sign("node_lost", node, None, event.time, number, text, weak=True)
    if event.kind == "slow_start":
        return _Sign("slow_start", "", None, event.time, number, text)
    return None


def _detection(failure: _Failure, main: _Sign | None) -> float | None:
    if main is None:
        return None
    if main.detection_s is not None:
        return main.detection_s
    return max(0.0, failure.decided - main.time) if failure.decided is not None else None
