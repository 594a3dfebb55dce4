"""The output of ``resilio simulate --json``. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import msgspec

from resilio_hpc.report.accounting.causes import DEFINITIONS, ETTR_TEXT, GOODPUT_TEXT
from resilio_hpc.simulate.study import Row, Study
from resilio_hpc.simulate.study_text import ettr, goodput, of_held, work

VERSION = 1


def study_json(found: Study) -> str:
    """Return one object; unknown values are null. The same for the same seed: how long it took is left out."""
    return json.dumps(study_object(found), indent=1)


def study_object(found: Study) -> dict[str, Any]:
    """Return the object that ``study_json`` writes."""
    return {
        "v": VERSION,
        "fleet": {"name": found.fleet.name, "source": found.fleet.source, "mix_source": found.fleet.mix_source,
                  "mtbf_s": found.fleet.mtbf_s(found.setup.gpus), "faults": dict(found.fleet.faults)},
        "setup": asdict(found.setup),
        "seeds": list(found.seeds),
        "definitions": {
            "goodput": GOODPUT_TEXT, "ettr": ETTR_TEXT, **{cause.value: text for cause, text in DEFINITIONS.items()}
        },
        "rows": [_row(row) for row in found.rows],
        "numbers": [msgspec.to_builtins(one) for one in found.numbers],
        "guesses": [one.name for one in found.guesses],
    }  # fmt: skip


def _row(row: Row) -> dict[str, Any]:
    return {
        "policy": row.case.policy,
        "differs": row.case.differs,
        "setup": asdict(row.case.setup),
        **{name: {"median": row.middle(of), "least": row.spread(of)[0], "most": row.spread(of)[1]}
           for name, of in (("ettr", ettr), ("goodput", goodput), ("work", work), ("of_held", of_held))},
        "repeats": [
            {"by_cause_us": {cause.value: us for cause, us in one.by_cause.items()}, "wall_us": one.wall_us,
             "ettr": one.ettr, "goodput": one.goodput, "work": one.work, "node_us": one.node_us,
             "idle_node_us": one.idle_node_us, "counts": one.counts, "ended": one.ended or None}
            for one in row.results
        ],
    }  # fmt: skip
