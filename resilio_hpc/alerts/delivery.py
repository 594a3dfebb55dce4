"""Alerts as messages to the targets of ``--notify``. Each target has a process of its own, and a deadline."""

from __future__ import annotations

import hashlib
import select
import time
from collections.abc import Mapping, Sequence

import msgspec

from resilio_hpc.alerts.alert import Alert
from resilio_hpc.alerts.memory import AlertChanges, AlertMemory, ReportedAlert, UndeliveredMessage
from resilio_hpc.alerts.run_facts import AlertFacts
from resilio_hpc.events.phrases import seconds
from resilio_hpc.launch.notify.notify import VERSION, Channel
from resilio_hpc.launch.rundir.notify_targets import Target

DEADLINE_S = 30.0  # for all messages of one check
_POLL_S = 0.2
ISOLATE = "suspect_node"  # its event is named for what a site does about it


def mark(target: Target) -> str:
    """Return what stands for a target in files: nothing of it can be read there."""
    return hashlib.sha256(target.text.encode()).hexdigest()[:16]


def messages(facts: AlertFacts, new: AlertChanges, found: Mapping[str, Sequence[str]]) -> list[dict[str, object]]:
    """Return one message for each change. Pure. ``found``: what the looks have found, by ``Alert.key``.

    ``event``: alert, clear, or isolate, for a site that takes nodes out itself.
    """
    told = [_fired(facts, alert, found.get(alert.key, ())) for alert in new.fired]
    return [*told, *(_cleared(facts, one) for one in new.cleared)]


def do_text(alert: Alert, facts: AlertFacts) -> str:
    """Return the one thing to do."""
    return alert.do.replace("{run}", str(facts.path)).replace("{node}", alert.about).replace("{job}", facts.state.job)


def _fired(facts: AlertFacts, alert: Alert, found: Sequence[str]) -> dict[str, object]:
    event = "isolate" if alert.name == ISOLATE else "alert"
    what = f"isolate {alert.about}" if event == "isolate" else f"{alert.severity.value} {alert.name}"
    lines = [f"{facts.path.name}: {what}: {alert.text}", *(f"- {line}" for line in found)]
    return {
        **_head(facts, event, alert.name, alert.about, alert.since), "severity": alert.severity.value,
        "value": alert.value, "limit": alert.limit, "unit": alert.unit, "since": alert.since,
        "do": do_text(alert, facts), "lines": list(alert.places),
        "text": "\n".join(lines),
    }  # fmt: skip


def _cleared(facts: AlertFacts, known: ReportedAlert) -> dict[str, object]:
    about = f" of {known.about}" if known.about else ""
    lasted = seconds(max(0.0, facts.now - known.since))
    text = f"{facts.path.name}: clear {known.name}{about} after {lasted} (it was: {known.text})"
    return {**_head(facts, "clear", known.name, known.about, known.since), "severity": "clear", "text": text}


def _head(facts: AlertFacts, event: str, name: str, about: str, since: float) -> dict[str, object]:
    return {
        "v": VERSION, "id": f"{facts.run_id}/{event}/{name}/{about}/{since:.0f}", "run_id": facts.run_id,
        "run_dir": str(facts.path), "job": facts.state.job, "event": event, "alert": name, "time": facts.now,
        **({"node": about} if about else {}),
    }  # fmt: skip


def with_messages(memory: AlertMemory, told: Sequence[dict[str, object]], targets: Sequence[Target]) -> AlertMemory:
    """Return the memory with messages that every target is still to get. Pure."""
    marks = tuple(mark(target) for target in targets)
    new = tuple(UndeliveredMessage(content, marks) for content in told) if marks else ()
    return msgspec.structs.replace(memory, undelivered=(*memory.undelivered, *new))


def deliver(
    memory: AlertMemory, targets: Sequence[Target], deadline_s: float = DEADLINE_S
) -> tuple[AlertMemory, list[str]]:
    """Send what waits. Return the memory with what no target took, and a line for each target that failed.

    A message whose target is not given any more is dropped.
    """
    left: list[UndeliveredMessage] = []
    errors: dict[str, str] = {}
    senders = {mark(target): _Sender(target) for target in targets}
    try:
        for waiting in memory.undelivered:
            for name in waiting.targets:
                if name in senders:
                    senders[name].queue.append(waiting)
        deadline = time.monotonic() + deadline_s
        while any(not sender.is_done for sender in senders.values()) and time.monotonic() < deadline:
            for sender in senders.values():
                sender.move(time.monotonic())
            fds = [fd for one in senders.values() if not one.is_done and (fd := one.channel.fileno()) is not None]
            select.select(fds, [], [], _POLL_S)
        for sender in senders.values():
            if not sender.is_done:
                sender.give_up(f"not delivered within {deadline_s:g} s")
            if sender.error:
                errors[sender.channel.target.name] = sender.error
    finally:
        for sender in senders.values():
            sender.channel.kill()
    for waiting in memory.undelivered:
        names = tuple(name for name in waiting.targets if name in senders and waiting in senders[name].failed)
        if names:
            left.append(UndeliveredMessage(waiting.content, names))
    told = [f"{name} was not reached: {why}; it is tried again at the next check" for name, why in errors.items()]
    return msgspec.structs.replace(memory, undelivered=tuple(left)), told


class _Sender:
    """The messages of one target, one after the other. After a failure the others wait for the next check."""

    def __init__(self, target: Target) -> None:
        self.channel = Channel(target)
        self.queue: list[UndeliveredMessage] = []
        self.failed: list[UndeliveredMessage] = []
        self.error = ""

    @property
    def is_done(self) -> bool:
        return not self.queue

    def move(self, now: float) -> None:
        """Take an answer, and send the next message."""
        if not self.queue:
            return
        if self.channel.busy:
            outcome = self.channel.outcome(now)
            if outcome is None:
                return
            if outcome:
                self.give_up(outcome)
                return
            self.queue.pop(0)
        if self.queue and (error := self.channel.send(self.queue[0].content, now)):
            self.give_up(error)

    def give_up(self, why: str) -> None:
        self.error = why
        self.failed += self.queue
        self.queue = []
