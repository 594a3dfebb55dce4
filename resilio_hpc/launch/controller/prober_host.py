"""The host's part for a test of nodes: a user's order, the coordinator's process, and the agents' checkers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import assert_never

from resilio_hpc.core.errors import UsageError
from resilio_hpc.diagnose import in_run
from resilio_hpc.diagnose.policy import PairPolicy, pair_policy
from resilio_hpc.diagnose.result import CheckResult
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.intents import PauseAndTest
from resilio_hpc.launch.controller.facts.state import Action, EndTest, RunTest, StartTest, TestAction
from resilio_hpc.launch.controller.faults import drill_orders
from resilio_hpc.launch.process.child_link import ChildLink
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.rundir import user_orders
from resilio_hpc.launch.rundir.storage import Storage
from resilio_hpc.launch.rundir.user_orders import UserOrder

EXTRA_S = 120.0  # for which a checker may live longer than its test: it waits until ranks pause
POLICY_VARIABLE = "RESILIO_PAIR_POLICY"  # a file with a site's values in place of pair_policy.toml's
_ANSWER: msgspec.json.Decoder[in_run.Answer] = msgspec.json.Decoder(in_run.Answer)


def policy_in_a_run(test_s: float, start_s: float | None = None) -> PairPolicy:
    """Return the policy of a test that ranks wait for; ``start_s``: for probers to start, at most.

    Raises UsageError for an invalid file of the site.
    """
    file = os.environ.get(POLICY_VARIABLE)
    policy = pair_policy(Path(file) if file else None)
    part_s = test_s / 3  # a hung pair leaves time for the next round
    return msgspec.structs.replace(
        policy, budget_s=test_s, compute_s=min(policy.compute_s, part_s), silence_s=min(policy.silence_s, part_s),
        collective_s=min(policy.collective_s, part_s),
        start_s=policy.start_s if start_s is None else min(policy.start_s, start_s),
    )  # fmt: skip


class ProberHost:
    """Carries out a controller's actions; ``tick`` returns what follows from the coordinator's answers."""

    def __init__(
        self, send: Callable[[str, m.ToAgent], None], storage: Storage, address: str, log: Path, threads: int = 0
    ) -> None:
        """Take where this node is reached, the coordinator's log, and how many CPUs a node has (0: all that it has)."""
        self._controller: Controller | None = None
        self._send = send
        self._storage = storage
        self._address = address
        self._threads = threads
        self._link = ChildLink("diagnose.in_run", log)
        self._test: StartTest | None = None
        self._why_not = ""
        self._ordered: dict[str, str] = {}  # the marks of the last orders, by kind
        self._taken: list[UserOrder] = []

    def begin(self, controller: Controller) -> None:
        """Serve another controller."""
        self.close()
        self._controller = controller

    def ordered(self, found: dict[str, Any] | None) -> None:
        """Take what the run directory has of a user's orders; each is removed before it is carried out."""
        for kind in user_orders.KINDS:
            order = user_orders.parse(kind, (found or {}).get(kind))
            if order is not None and order.mark != self._ordered.get(kind):
                self._ordered[kind] = order.mark
                self._take(order)

    def _take(self, order: UserOrder) -> None:
        def taken(reply: dict[str, Any] | None) -> None:
            if reply is not None and reply["taken"]:
                self._taken.append(order)

        self._storage.request("take_order", taken, kind=order.kind, mark=order.mark)

    def carry_out(self, action: TestAction) -> None:
        """Start, run or end a test."""
        match action:
            case StartTest():
                self._begin(action)
            case RunTest():
                if self._test is not None and self._link.takes:
                    self._link.write(in_run.GO)
            case EndTest():
                self._end()
                for node in action.nodes:
                    self._send(node, m.EndProbe(action.epoch, action.number))
            case _:
                assert_never(action)

    def _begin(self, action: StartTest) -> None:
        self._test, self._why_not = action, ""
        try:
            policy = policy_in_a_run(action.test_s, action.start_s)
            self._link.start()
        except (UsageError, OSError) as error:
            self._why_not = str(error)
            return
        request = in_run.TestRequest(
            nodes=action.nodes, policy=policy, address=self._address, threads=self._threads,
            start_checks=action.start_s is not None,
        )  # fmt: skip
        self._link.write(msgspec.json.encode(request) + b"\n")

    def tick(self) -> list[Action]:
        """Take a user's order, and what the coordinator says if a test is under way."""
        controller = self._controller
        if controller is None:
            return []
        if self._taken:
            order = self._taken.pop(0)
            if order.kind == "checkpoint":
                return controller.let(lambda: controller.checkpoints.ordered.begin(order.mark, order.by))
            if order.kind == "drill":
                return drill_orders.actions(controller.run, order)
            by = f" by {order.by}" if order.by else ""
            asked = PauseAndTest(f"ordered{by}", order.replace, order.mark)
            return controller.let(lambda: controller.tests.begin(asked))
        if self._test is None:
            return []
        if self._why_not:
            return self._tested(controller, self._why_not)
        self._link.push()
        lines = self._link.read()
        if lines is None:
            return self._tested(controller, "its coordinator ended")
        actions: list[Action] = []
        for line in lines:
            actions += self._heard(controller, _ANSWER.decode(line))
        return actions

    def _heard(self, controller: Controller, answer: in_run.Answer) -> list[Action]:
        test = self._test
        if test is None:
            return []
        match answer:
            case in_run.Listens(settings=settings):
                text = msgspec.json.encode(settings).decode()
                limit_s = settings.policy.start_s + test.test_s + EXTRA_S
                for node in test.nodes:
                    self._send(node, m.BeginProbe(controller.run.epoch, test.number, text, limit_s))
                return []
            case in_run.ProbersReady():
                return controller.let(lambda: controller.tests.ready(test.number))
            case in_run.Tested(result=result):
                return self._tested(controller, result)
        assert_never(answer)

    def _tested(self, controller: Controller, result: CheckResult | str) -> list[Action]:
        test, self._test = self._test, None
        assert test is not None
        return controller.let(lambda: controller.tests.tested(test.number, result))

    def _end(self) -> None:
        self._test = None
        self._link.end()

    def close(self) -> None:
        """End the coordinator: this node leads no more."""
        self._controller = None
        self._end()
