"""Random meetings of our drains and an administrator's, with real Slurms: the administrator's stay.

RESILIO_DRAIN_MEETINGS=500 is the whole of it, 20 to 40 minutes for each Slurm; else it is a sample.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import Completed
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from resilio_hpc.slurm.client.command_client import CommandClient
from tests.support.clusters import each_series
from tests.support.slurm.drain_meetings import NODES, AdminAndUs
from tests.support.slurm.fake_slurmctld import FakeNode, nothing

pytestmark = each_series(HOST_SERIES, slow=[NEWEST_SERIES])
EXAMPLES = int(os.environ.get("RESILIO_DRAIN_MEETINGS", "12"))


class RealSlurmctld:
    """A Runner on the controller, which lets others act before each of our commands."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.between: Callable[[Sequence[str]], None] = nothing
        self.updates = 0
        self.time, self.sleep = time.time, time.sleep
        self._client = CommandClient(self._run)

    def _run(self, argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        return self.cluster.run("ctl", argv, timeout_s, env=extra)

    def __call__(self, argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        self.between(list(argv))
        return self._run(argv, timeout_s, extra)

    @property
    def nodes(self) -> Mapping[str, FakeNode]:
        """As they are now."""
        found = self._client.nodes(NODES)
        return {node.name: FakeNode(node.state.base, node.state.drain, node.reason) for node in found}

    def update(self, words: Sequence[str]) -> None:
        try:
            self._run(["scontrol", "update", *words], 20.0, {})
        except CommandError as error:
            # ReturnToService: a node that was DOWN may have come back by itself
            if "State=RESUME" not in words or "Invalid node state" not in error.stderr:
                raise
        self.updates += 1

    def all_in_service(self) -> None:
        for name, node in self.nodes.items():
            if node.drain or node.base == "DOWN":
                self.update([f"NodeName={name}", "State=RESUME"])


def test_whatever_the_order_an_administrators_drain_stays(cluster: DevCluster) -> None:
    slurm, came_to = RealSlurmctld(cluster), Counter[str]()
    began: list[float] = []

    class WithSlurm(AdminAndUs):
        def begin(self) -> RealSlurmctld:
            began.append(time.monotonic())
            if len(began) % 25 == 0:
                print(f"{len(began)} meetings in {began[-1] - began[0]:.0f} s: {dict(came_to)}", flush=True)
            slurm.between = nothing
            slurm.all_in_service()
            return slurm

        def _judge(self, result: str, name: str, gaps: list[str]) -> None:
            came_to[result + (" (at the same moment)" if gaps else "")] += 1
            super()._judge(result, name, gaps)

    settings = hypothesis.settings(
        max_examples=EXAMPLES, stateful_step_count=6, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(WithSlurm, settings=settings)
    print(f"{len(began)} meetings, {slurm.updates} orders of the administrator; ours: {dict(came_to)}")
    assert came_to["drained"] and came_to["left"]
