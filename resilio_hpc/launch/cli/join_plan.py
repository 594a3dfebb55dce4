"""What ``resilio-launch --join --dry-run`` prints. Pure."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from resilio_hpc.events.phrases import plural
from resilio_hpc.launch.allocation.placements import Site
from resilio_hpc.launch.chain.joining import Facts
from resilio_hpc.launch.workers.rank_env import rank_argv


@dataclass(frozen=True)
class JoinPlan:
    """What a join would do. ``waits_for``: why it would have to wait now; "" when it would not."""

    run_dir: str
    program: tuple[str, ...]
    job: str
    nodes_now: tuple[str, ...]
    nodes_joining: tuple[str, ...]
    ranks_per_node: str
    waits_for: str

    def as_json(self) -> str:
        """Return the plan as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """Return one line per fact."""
        rows = (
            ("joins", self.run_dir),
            ("program", shlex.join(self.program) or "not known yet"),
            ("run's job", f"{self.job or 'not known yet'}, {plural(len(self.nodes_now), 'node')} with an agent"),
            ("adds", f"{plural(len(self.nodes_joining), 'node')}: {', '.join(self.nodes_joining)}"),
            ("ranks per node", self.ranks_per_node or "not known yet"),
            ("waits", self.waits_for or "no, it can join now"),
        )
        return "\n".join(f"{name:<15} {value}" for name, value in rows)


def join_plan(facts: Facts, path: Path, site: Site, waits_for: str) -> JoinPlan:
    """Return the plan of a join, from what the run directory shows now."""
    record = facts.record
    return JoinPlan(
        run_dir=str(path),
        program=rank_argv(record.options, 0) if record else (),
        job=record.job if record else "",
        nodes_now=facts.agents,
        nodes_joining=site.nodes,
        ranks_per_node=record.options.nproc_per_node if record else "",
        waits_for=waits_for,
    )
