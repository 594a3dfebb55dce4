"""The one list of metrics: names that Prometheus takes, few labels, and the page that shows it."""

from __future__ import annotations

import re

from resilio_hpc.metrics.schema import ERRORS, METRICS, PARTS, markdown
from tests.support.environments import ROOT

LABELS = {"rank", "gpu", "device", "op", "alert", "severity"}


def test_names_are_prometheus_names_with_a_unit_and_known_labels() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]+", name)
        assert set(metric.labels) <= LABELS, name
        assert metric.help and metric.source, name
        assert len(metric.labels) <= 2, name


def test_parts_have_the_subjects_of_the_schema() -> None:
    assert set(PARTS) == {"host", "storage", "network", "gpu", "ranks", "collectives", "run", "check", "sampler"}
    assert sum(map(len, PARTS.values())) == len(METRICS)


def test_counters_of_errors_are_counters_and_no_traffic() -> None:
    assert {METRICS[name].kind for name in ERRORS} == {"counter"}
    assert not {name for name in ERRORS if "bytes" in name or "seconds" in name}
    for name in ("gpu_ecc_uncorrected_total", "infiniband_link_downs_total", "network_receive_errors_total"):
        assert name in ERRORS


def test_the_page_shows_the_list() -> None:
    assert markdown() in (ROOT / "docs" / "metrics.md").read_text(), "run: .venv/bin/python scripts/reference.py"
