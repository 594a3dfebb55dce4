"""What Prometheus would have scraped from a run, and the questions that promtool answers about it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.requirements import need_program

Series = dict[str, list[float | None]]


@dataclass
class Scrapes:
    """Samples of one exporter, ``every_s`` seconds apart, from its own text."""

    every_s: int
    series: Series = field(default_factory=dict)
    count: int = 0

    def take(self, text: bytes) -> None:
        """One scrape."""
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                values = self.series.setdefault(f"{sample.name}{{{labels}}}", [])
                values += [None] * (self.count - len(values))
                values.append(sample.value)
        self.count += 1

    @property
    def now_s(self) -> int:
        """The time of the newest scrape; the first one is at 0."""
        return (self.count - 1) * self.every_s

    def as_input(self) -> list[dict[str, str]]:
        """promtool's input series."""
        return [
            {"series": name, "values": " ".join("_" if value is None else repr(value) for value in values)}
            for name, values in self.series.items()
        ]


def firing(rules: Path, scrapes: Scrapes, expected: Mapping[int, Sequence[str]], alert: str, folder: Path) -> str:
    """Let promtool look which alerts of a name fire at some seconds; return its complaint, "" where all is right.

    ``expected``: second → the values of the label ``alert`` of those that fire (one "" where there is no such label).
    """
    need_program("promtool", package="prometheus")
    tests = [
        {
            "expr": f'count by (alert) (ALERTS{{alertname="{alert}",alertstate="firing"}})',
            "eval_time": f"{second}s",
            "exp_samples": [
                {"labels": f'{{alert="{name}"}}' if name else "{}", "value": 1} for name in sorted(names)
            ],
        }
        for second, names in expected.items()
    ]  # fmt: skip
    every = f"{scrapes.every_s}s"
    file = folder / f"{alert}.json"  # JSON is YAML
    file.write_text(json.dumps({
        "rule_files": [str(rules)], "evaluation_interval": every,
        "tests": [{"interval": every, "input_series": scrapes.as_input(), "promql_expr_test": tests}],
    }))  # fmt: skip
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"
