"""What a controller's host does for a test of nodes, in virtual time: probers that come late, fail, or find a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from resilio_hpc.diagnose.result import CheckResult, NodeResult
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.state import Action, EndTest, RunTest, StartTest, TestAction

if TYPE_CHECKING:
    from tests.support.virtual_cluster.world import World

RATIO = 2.0  # of a node that the world has made slow


class VirtualProbers:
    """One controller's."""

    def __init__(self, world: World, controller: Controller, event: Callable[[Callable[[], list[Action]]], None]):
        self._world, self._controller, self._event = world, controller, event
        self._test: StartTest | None = None

    def carry_out(self, action: TestAction) -> None:
        """Start, run or end a test."""
        tests, let = self._controller.tests, self._controller.let
        if isinstance(action, EndTest):
            self._test = None
        elif isinstance(action, StartTest):
            self._test = action
            self._after(self._world.probers_s, action, lambda: let(lambda: tests.ready(action.number)))
        elif isinstance(action, RunTest) and self._test is not None:
            test = self._test
            result = self._world.test_fails or self._result(test)
            self._after(self._world.testing_s, test, lambda: let(lambda: tests.tested(test.number, result)))

    def _after(self, seconds: float, test: StartTest, act: Callable[[], list[Action]]) -> None:
        self._world.after(seconds, lambda: self._event(act) if self._test is test else None)

    def _result(self, test: StartTest) -> CheckResult:
        slow = [node for node in test.nodes if node in self._world.slow_nodes]
        nodes = tuple(
            NodeResult(
                node=node, state="slow" if node in slow else "healthy", compute_ratio=RATIO if node in slow else 1.0
            )
            for node in test.nodes
        )
        outcome = "found" if slow else "fine"
        return CheckResult(outcome=outcome, why="", nodes=nodes, rounds=2, seconds=self._world.testing_s)
