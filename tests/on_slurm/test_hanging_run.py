"""Run directory and working directory hang, both on a real file system that hangs: agents come up all the same."""

from __future__ import annotations

import pytest

from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.drills.drill import DrillRun
from resilio_hpc.drills.kind import Act, Drill
from tests.support.clusters import own_cluster
from tests.support.requirements import need_shared_mounts

pytestmark = pytest.mark.slow

HANGS = Drill(
    "everything shared hangs, an agent killed inside",
    (Act("hang_shared"), Act("kill_agent", "follower", after_s=3.0), Act("release_shared", after_s=40.0)),
    nnodes="2:3",
    steps=900,
    step_s=0.05,
    shared_mount="fuse",
)


def test_an_agent_that_is_killed_while_all_hangs_is_back_before_it_answers() -> None:
    need_shared_mounts()
    with own_cluster("hangs", why="its /shared hangs", nodes=4, shared_mount="fuse") as cluster:
        run = DrillRun(cluster, HANGS, "drill", torch=False)
        result = run.run()
        assert result.passed, result.why
        hung, _, released = run._done
        events = read_ledger(cluster.shared / "drill" / "ledger")
    inside = [event for event in events if hung < event.time < released]
    assert [event.kind for event in inside if event.kind in ("agent_ended", "agent")] == ["agent_ended", "agent"]
    assert "agent_joined" in {event.kind for event in inside}  # a controller leads, and takes it in
    assert whole(events)


def whole(events: list[Event]) -> bool:
    """No line of a ledger was written twice."""
    lines = [(event.time, event.writer, event.kind, repr(event.fields)) for event in events]
    return len(lines) == len(set(lines))
