"""Tells of a checkpoint that takes far too long: a file system that hangs gives no error. Pure.

Told once, until a checkpoint is committed again: meanwhile only the steps since the last one are at risk.
"""

from __future__ import annotations

from typing import Any

from resilio_hpc.launch.protocol import messages as m

LEAST_S = 60.0
TIMES_AS_LONG = 3.0  # times the longest save of this controller so far

Answer = m.StepPersisted | m.PersistFailed | m.ManifestWritten


class SlowSaves:
    """Measures saves from the controller's orders and the answers. ``now``: seconds of a clock that does not jump."""

    def __init__(self) -> None:
        self._save: tuple[int, int] | None = None  # round and step of the present save
        self._since = 0.0
        self._waits_for: set[str] = set()
        self._longest_s = 0.0
        self._told_at: float | None = None  # since when; the first slow save was told then

    def ordered(self, node: str, order: m.PersistStep | m.CommitStep, now: float) -> None:
        """Take note that ``node`` was ordered to write its file, or the manifest."""
        if self._save != (order.round, order.step):
            self._save, self._since = (order.round, order.step), now
            self._waits_for.clear()
        self._waits_for.add(node)

    def answered(self, answer: Answer, now: float) -> dict[str, Any] | None:
        """Take an answer. Return ``save_resumed``, to be recorded, when saves go on after a slow one; else None."""
        if isinstance(answer, m.ManifestWritten):
            if self._save == (answer.round, answer.step):
                self._save, self._longest_s = None, max(self._longest_s, now - self._since)
            began, self._told_at = self._told_at, None
            return None if began is None else {"step": answer.step, "waited_s": round(now - began, 3)}
        if self._save == (answer.round, answer.step):
            self._waits_for.discard(answer.node)
            if isinstance(answer, m.PersistFailed):
                self._save = None
        return None

    def overdue(self, now: float) -> dict[str, Any] | None:
        """Return ``save_overdue``, to be recorded, when the present save takes too long; else None."""
        waited_s = now - self._since
        if self._save is None or self._told_at is not None:
            return None
        if waited_s < max(LEAST_S, TIMES_AS_LONG * self._longest_s):
            return None
        self._told_at = self._since
        return {"step": self._save[1], "waited_s": round(waited_s, 3), "nodes": sorted(self._waits_for)}

    def abandoned(self, round_number: int) -> None:
        """Forget saves of earlier rounds than this one: their ranks are gone."""
        if self._save is not None and self._save[0] < round_number:
            self._save = None
