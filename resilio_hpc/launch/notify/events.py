"""Which of the controller's ledger entries become notifications, and their text (DLR-4). Pure.

There is one notification per failure: the first failure of a rank, as well as it can be told from its consequences
after ``SETTLE_S``. Failures until training goes on belong to the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.events.event_text import words
from resilio_hpc.events.rungs import rung_words
from resilio_hpc.launch.protocol.messages import RankFailure
from resilio_hpc.launch.protocol.root_cause import origin

SETTLE_S = 0.3  # consequences of a failure arrive within this time, sometimes before the failure itself
MAX_TEXT = 1000


@dataclass(frozen=True)
class Notice:
    """One notification.

    ``event``: failure, recovered, node_lost, joined, left, checkpoint_failed, memory, slow, verdict or summary;
    ``about`` makes it unique among the run's events of that kind; ``time`` in Unix seconds.
    """

    event: str
    time: float
    text: str
    about: str = ""
    node: str = ""
    rank: int | None = None
    kind: str = ""
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    verdict: str = ""
    count: int = 1  # of a summary: the number of its events

    def as_fields(self) -> dict[str, Any]:
        """Return the known fields, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "") and name != "about"}


class NoticeMaker:
    """Takes the controller's ledger entries in their order; ``due`` returns the notifications.

    ``now`` is in Unix seconds, as the entries' own times are.
    """

    def __init__(self) -> None:
        self._ready: list[Notice] = []
        self._failures: list[RankFailure] = []  # of a failure that is not notified yet
        self._decision = ""
        self._tell_at = 0.0
        self._failing = False
        self._unsaved: set[int] = set()  # steps that could not be committed since the last commit
        self._known: set[str] = set()  # nodes that have been with this controller
        self._members: tuple[str, ...] = ()
        self._round = -1

    def take(self, entry: str, fields: Mapping[str, Any], now: float) -> None:
        """Take one ledger entry of the controller's."""
        handler = getattr(self, f"_on_{entry}", None)
        if handler is not None:
            handler(Fields(fields), now)

    def due(self, now: float) -> list[Notice]:
        """Return the notifications to send now."""
        if self._failures and now >= self._tell_at:
            self._tell_failure(now)
        ready, self._ready = self._ready, []
        return ready

    # -- entries, by their kind in the ledger --------------------------------------------------------------------

    def _on_stepped_down(self, f: Fields, now: float) -> None:
        self._failures, self._failing, self._known, self._members = [], False, set(), ()

    def _on_round(self, f: Fields, now: float) -> None:
        self._members = f.texts("members")
        self._round = f.whole("round") or 0

    def _on_rank_failed(self, f: Fields, now: float) -> None:
        late = _whole(f, "round") < self._round and not self._failing  # a consequence that came after the recovery
        if late or (self._failing and not self._failures):  # or notified already
            return
        if not self._failing:
            self._failing, self._tell_at, self._decision = True, now + SETTLE_S, ""
        self._failures.append(
            RankFailure(
                f.text("node"), _whole(f, "rank"), _whole(f, "local_rank"), f.text("kind"), f.number("time") or now,
                f.whole("exit_code"), f.whole("signal"), f.text("message"),
            )
        )  # fmt: skip

    def _on_rank_restarted(self, f: Fields, now: float) -> None:
        """Tell of the failure: the run went on, so no recovery follows. The next rank's failure is another one."""
        self._tell_failure(now)
        self._failing = False

    def _on_slow_start(self, f: Fields, now: float) -> None:
        if not self._failing:
            self._failing = True
            about = f"round {f.whole('round')}"
            self._ready.append(Notice("failure", now, words("slow_start", f.data), about, kind="slow_start"))

    def _on_hang(self, f: Fields, now: float) -> None:
        """Tell of ranks that do not go on and are not restarted; those that are restarted have failed."""
        if f.data.get("acted") or f.data.get("moves"):
            return
        node = next(iter(f.texts("nodes")), "")
        about = f"round {f.whole('round')} {f.text('kind')}"
        self._ready.append(Notice("failure", now, words("hang", f.data), about, node=node, kind="hang"))

    def _on_slow(self, f: Fields, now: float) -> None:
        node = next(iter(f.texts("nodes")), "")
        about = f"round {f.whole('round')} {node} {f.text('what')} {f.number('since')}"
        self._ready.append(Notice("slow", now, words("slow", f.data), about, node=node, kind=f.text("cause")))

    def _on_decision(self, f: Fields, now: float) -> None:
        would = "" if f.data.get("acted", True) else "would have been: "
        self._decision = f"{would}{rung_words(f.text('rung'))}"

    def _on_node_lost(self, f: Fields, now: float) -> None:
        node = f.text("node")
        self._known.discard(node)
        if node in self._members or not self._members:  # the loss of a spare interrupts no rank
            self._failing = True
        about = f"{node} round {self._round}"
        self._ready.append(Notice("node_lost", now, words("node_lost", f.data), about, node=node, kind="node_lost"))

    def _on_agent_left(self, f: Fields, now: float) -> None:
        node = f.text("node")
        self._known.discard(node)
        self._ready.append(Notice("left", now, words("agent_left", f.data), f"{node} round {self._round}", node=node))

    def _on_agent_joined(self, f: Fields, now: float) -> None:
        node = f.text("node")
        if self._members and node not in self._known | set(self._members):  # not at the start, nor to a new controller
            about = f"{node} {f.text('incarnation')}"
            self._ready.append(Notice("joined", now, words("agent_joined", f.data), about, node=node))
        self._known.add(node)

    def _on_first_step(self, f: Fields, now: float) -> None:
        self._failing = bool(self._failures)  # ends a spare's failure, or one that needed no recovery

    def _on_recovered(self, f: Fields, now: float) -> None:
        self._tell_failure(now)
        self._failing = False
        rank, node, kind = f.whole("rank"), f.text("node"), f.text("kind")
        about = f"round {f.whole('round')}"
        self._ready.append(Notice("recovered", now, words("recovered", f.data), about, node, rank, kind))

    def _on_persist_failed(self, f: Fields, now: float) -> None:
        before = len(self._unsaved)
        self._unsaved.add(_whole(f, "step"))  # a single one may just have been replaced by the next
        if before == 1 and len(self._unsaved) == 2:  # once, until a checkpoint succeeds
            text, about = words("persist_failed", f.data), f"step {f.whole('step')}"
            error = printable(f.text("error"), MAX_TEXT)
            self._ready.append(Notice("checkpoint_failed", now, text, about, f.text("node"), message=error))

    def _on_save_overdue(self, f: Fields, now: float) -> None:
        about = f"step {f.whole('step')}"
        self._ready.append(Notice("checkpoint_failed", now, words("save_overdue", f.data), about))

    def _on_memory_alert(self, f: Fields, now: float) -> None:
        about = f"{f.text('node')} level {f.whole('level')} at {now:.0f}"
        self._ready.append(Notice("memory", now, words("memory_alert", f.data), about, f.text("node")))

    def _on_committed(self, f: Fields, now: float) -> None:
        self._unsaved.clear()

    def _on_verdict(self, f: Fields, now: float) -> None:
        self._tell_failure(now)
        self._failing = False
        first, verdict = f.inner("first_failure"), f.text("verdict")
        text = words("verdict", f.data)
        if first.data:
            text += f"; first failure: {words('rank_failed', first.data)}"
        self._ready.append(_of_failure("verdict", now, text, first, "", verdict))

    def _tell_failure(self, now: float) -> None:
        first = origin(self._failures)
        self._failures = []
        if first is None:
            return
        data = {name: getattr(first, name) for name in first.__struct_fields__}
        text = words("rank_failed", data)
        if self._decision:
            text += f"; {self._decision}"
        about = f"rank {first.rank} at {first.time:.3f}"
        self._ready.append(_of_failure("failure", first.time, text, Fields(data), about))


def _of_failure(event: str, time: float, text: str, first: Fields, about: str, verdict: str = "") -> Notice:
    return Notice(
        event, time, printable(text, MAX_TEXT), about, first.text("node"), first.whole("rank"), first.text("kind"),
        first.whole("exit_code"), first.whole("signal"), printable(first.text("message"), MAX_TEXT), verdict,
    )  # fmt: skip


def _whole(f: Fields, name: str) -> int:
    value = f.whole(name)
    return -1 if value is None else value
