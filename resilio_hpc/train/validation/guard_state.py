"""What a guard of steps has learned and counted, and the step that waits for another device: part of the checkpoint."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from resilio_hpc.core.errors import UsageError
from resilio_hpc.train.validation.spikes import SpikeJudge

VERSION = 1
_NOISE_MARGIN = 4.0  # two results may differ by so many times what was measured


@dataclass(frozen=True)
class Pending:
    """A suspect result that came twice on ``device``, and was on no other one yet."""

    step: int
    loss: float
    norm: float
    digest: int
    why: str
    device: str


class GuardState:
    """``noise``: relative difference that is usual between two computations of the same; 0.0: none was measured."""

    def __init__(self, warm_up: int, factor: float) -> None:
        self._warm_up = warm_up
        self._factor = factor
        self._judges: dict[str, SpikeJudge] = {}
        self._largest = 0.0
        self.counts: Counter[str] = Counter()
        self.pending: Pending | None = None

    @property
    def noise(self) -> float:
        """Return by how much results may differ."""
        return _NOISE_MARGIN * self._largest

    def measured(self, difference: float) -> None:
        """Take a measured difference of two computations on one device."""
        if difference < 1.0:
            self._largest = max(self._largest, difference)

    def why_suspect(self, values: Mapping[str, float]) -> str:
        """Return what is wrong with a step's values, "" where nothing is."""
        for name, value in values.items():
            why = self._judge(name).why_suspect(value)
            if why:
                return f"{name} {why}"
        return ""

    def accept(self, values: Mapping[str, float]) -> None:
        """Learn from a step that counts."""
        for name, value in values.items():
            self._judge(name).accept(value)

    def explain(self, values: Mapping[str, float]) -> None:
        """Take note that suspect values were found right."""
        for name, value in values.items():
            if self._judge(name).why_suspect(value):
                self._judge(name).explain(value)

    def _judge(self, name: str) -> SpikeJudge:
        return self._judges.setdefault(name, SpikeJudge(self._warm_up, self._factor))

    def count(self, verdict: str) -> None:
        """Count a verdict."""
        self.counts[verdict] += 1

    def device_of(self, parameter: torch.Tensor | None) -> str:
        """Return node and device of this process, as text."""
        device = "cpu" if parameter is None else str(parameter.device)
        if device.startswith("cuda") and torch.cuda.is_available():
            device = str(torch.cuda.get_device_properties(device).uuid)
        return f"{socket.gethostname()} {device}"[:100]

    def to_plain(self) -> dict[str, Any]:
        """Return all of it as plain values, which ``load`` takes."""
        return {
            "version": VERSION, "noise": self._largest, "counts": dict(self.counts),
            "judges": {name: judge.state() for name, judge in self._judges.items()},
            "pending": None if self.pending is None else asdict(self.pending),
        }  # fmt: skip

    def load(self, plain: Mapping[str, Any]) -> None:
        """Take up what ``to_plain`` returned. Raises UsageError for that of a later version."""
        if plain.get("version") != VERSION:
            raise UsageError(f"the state of a step guard has version {plain.get('version')!r}, not {VERSION}")
        self._largest = float(plain["noise"])
        self.counts = Counter(plain["counts"])
        self._judges.clear()
        for name, state in plain["judges"].items():
            self._judge(name).restore(bytes(state))
        self.pending = None if plain["pending"] is None else Pending(**plain["pending"])
