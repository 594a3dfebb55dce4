"""With job_container/tmpfs each job has a /tmp and a /dev/shm of its own; arenas lie there and go with it."""

from __future__ import annotations

import pytest

from resilio_hpc.devtools.demo.stage import binds, events_of
from resilio_hpc.drills.drill import DrillRun
from resilio_hpc.drills.table import drill_named
from tests.support.clusters import own_cluster
from tests.support.requirements import need_slurm

pytestmark = pytest.mark.slow


def test_an_agent_that_is_started_again_finds_its_snapshots_and_the_job_leaves_nothing() -> None:
    need_slurm()
    if any(path.is_relative_to("/tmp") for path in binds()):
        pytest.skip("this checkout lies in /tmp, which jobs do not see here")
    with own_cluster("private", why="each job has a /tmp of its own", nodes=3, private_tmp=True) as cluster:
        result = DrillRun(cluster, drill_named("agent SIGKILL"), "private").run()
        assert result.passed, f"{result.why}\n{(cluster.shared / 'private.txt').read_text()[-6000:]}"
        (run,) = [path.parent for path in cluster.shared.glob("**/run.json")]
        restored = [event.fields["restored"] for event in events_of(run) if event.kind == "first_step"]
        assert int(str(restored[-1])) > 0
        cluster.run("ctl", ["bash", "-c", "while squeue -h | grep -q .; do sleep 0.1; done"], timeout_s=60.0)
        for node in cluster.nodes:
            left = cluster.run(node, ["find", "/dev/shm", "/tmp", "/run/job-tmp", "-name", "*resilio*"]).stdout.split()
            assert left == [], "the node's own directories, and those that its jobs had"
