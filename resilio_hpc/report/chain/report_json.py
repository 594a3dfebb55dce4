"""The output of ``resilio report --json``. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.causes import DEFINITIONS, ETTR_TEXT, GOODPUT_TEXT, US, TimeSpan
from resilio_hpc.report.chain.recoveries import ChainRecovery
from resilio_hpc.report.chain.run_report import RunReport

VERSION = 1


def report_json(report: RunReport) -> str:
    """Return one object; unknown values are null. ``lines``: FILE:NUMBER below the run's ``ledger``."""
    return json.dumps(report_object(report), indent=1)


def report_object(report: RunReport) -> dict[str, Any]:
    """Return the object that ``report_json`` writes."""
    time, verdict = report.time, report.state.verdict
    saves = asdict(report.checkpoints)
    del saves["steps"]
    return {
        "v": VERSION,
        "run_dir": str(report.path),
        "run_id": report.run_id,
        "time": report.now,
        "state": report.state.state,
        "verdict": verdict.verdict if verdict is not None else None,
        "steps_known": time.steps_known,
        "goodput": time.goodput,
        "ettr": time.ettr,
        "definitions": {
            "goodput": GOODPUT_TEXT, "ettr": ETTR_TEXT, **{cause.value: text for cause, text in DEFINITIONS.items()}
        },
        "wall_us": time.wall_us,
        "jobs_us": time.jobs_us,
        "useful_us": time.useful_us,
        "jobs": [
            {"part": part.facts.key, "job": part.facts.job, "began": part.facts.began.us / US,
             "ended": part.facts.ended.us / US, "nodes": list(part.facts.nodes)}
            for part in time.parts
        ],
        "by_cause": {
            cause.value: {"wall_us": us, "node_us": report.nodes.by_cause[cause]}
            for cause, us in report.by_cause.items()
        },
        "spans": [_span(span) for span in time.spans],
        "recoveries": [recovery_object(one) for one in report.recoveries],
        "checkpoints": saves,
        "cost": {
            "gpus_per_node": report.cost.gpus_per_node, "unit": report.cost.unit, "hours": report.cost.hours(),
            "by_cause": {cause.value: report.cost.hours(cause) for cause in report.cost.node_hours},
        },
        "advice": [asdict(one) for one in report.advice],
    }  # fmt: skip


def line_names(lines: Iterable[Event]) -> list[str]:
    """Return ``FILE:NUMBER`` for ledger lines that were read from files."""
    return [f"{line.file}:{line.line}" for line in lines if line.line]


def _span(span: TimeSpan) -> dict[str, Any]:
    return {
        "begin_us": span.begin_us, "end_us": span.end_us, "cause": span.cause.value, "why": span.why,
        "part": span.part or None, "round": span.round, "lines": line_names(span.lines),
    }  # fmt: skip


def recovery_object(one: ChainRecovery) -> dict[str, Any]:
    """Return a fault and what became of it."""
    return {
        **asdict(one.fault), "outcome": one.outcome.value, "part": one.part or None, "cause": one.cause,
        "confidence": one.confidence, "primary": one.primary, "class": one.failure_class, "place": one.place,
        "root": one.root, "echoes": one.echoes, "down_s": one.down_s, "lines": line_names(one.lines),
    }  # fmt: skip
