"""An administrator and our drains, in whatever order: a state machine, for a model of slurmctld or a real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resilio_hpc.core.process import Completed
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.drain.outcome import DrainResult
from resilio_hpc.slurm.drain.policy import drain_policy
from resilio_hpc.slurm.drain.reason import Finding, read_reason
from resilio_hpc.slurm.drain.writer import DrainWriter
from resilio_hpc.slurm.orders.audit import AuditLog
from tests.support.slurm.fake_slurmctld import FakeNode

NODES = ("n1", "n2")
CHECKS = ("gpu.xid", "disk.full", "ib.link")
REASONS = ("bob: disk swap", "resilio: by hand", "Kill task failed", "resilio:gpu.xid: Xid 79 on GPU 3 - mine now, bob")
acts = st.tuples(st.sampled_from(["drain", "down", "edit", "resume"]), st.sampled_from(REASONS), st.sampled_from(NODES))
# what an administrator does, and before which of the commands that one wish of ours takes
meanwhile = st.lists(st.tuples(st.integers(0, 14), acts), max_size=3)


class Slurmctld(Protocol):
    """What both have. ``between`` is called before each command of ours; ``updates`` rises with each ``update``."""

    between: Callable[[Sequence[str]], None]
    updates: int

    @property
    def nodes(self) -> Mapping[str, FakeNode]: ...

    def __call__(self, argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed: ...

    def update(self, words: Sequence[str]) -> None: ...

    def time(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class AdminAndUs(RuleBasedStateMachine):
    """``held``: what the administrator wants of a node, until the administrator wants something else."""

    def __init__(self) -> None:
        super().__init__()
        self.slurm = self.begin()
        self.held: dict[str, str] = {}
        self.hit: set[str] = set()  # whose order fell between our last look and our write
        self.writer = DrainWriter(
            CommandClient(self.slurm), drain_policy(), AuditLog(None), clock=self.slurm.time, sleep=self.slurm.sleep
        )

    def begin(self) -> Slurmctld:
        """Nodes that are all in service."""
        raise NotImplementedError

    @rule(act=acts)
    def admin(self, act: tuple[str, str, str]) -> None:
        kind, reason, name = act
        node = self.slurm.nodes[name]
        if kind == "edit" and not node.drain:
            return
        if kind == "resume":
            self.held.pop(name, None)
            self.hit.discard(name)
            if node.drain or node.base == "DOWN":
                self.slurm.update([f"NodeName={name}", "State=RESUME"])
            return
        if kind == "edit" and read_reason(node.reason):
            reason = node.reason.replace("failed", "failed; mine, bob")  # the tag stays, and no longer fits
        state = {"drain": ["State=DRAIN"], "down": ["State=DOWN"], "edit": []}[kind]
        self.slurm.update([f"NodeName={name}", *state, f"Reason={reason}"])
        if kind == "down" and not node.drain:
            return  # a node that is DOWN is not drained: it may be, and is told so by its state
        self.held[name] = reason
        self.hit.discard(name)

    @rule(name=st.sampled_from(NODES), check=st.sampled_from(CHECKS), others=meanwhile)
    def we_drain(self, name: str, check: str, others: Sequence[tuple[int, tuple[str, str, str]]]) -> None:
        with_others = self._meanwhile(others)
        outcome = self.writer.drain(name, Finding(check, f"{check} failed"))
        self._judge(outcome.result, name, with_others)

    @rule(name=st.sampled_from(NODES), check=st.none() | st.sampled_from(CHECKS), others=meanwhile)
    def we_undrain(self, name: str, check: str | None, others: Sequence[tuple[int, tuple[str, str, str]]]) -> None:
        with_others = self._meanwhile(others)
        outcome = self.writer.undrain(name, check)
        self._judge(outcome.result, name, with_others)

    def _meanwhile(self, others: Sequence[tuple[int, tuple[str, str, str]]]) -> list[str]:
        """Let others act before the n-th command; in the 10 ms of a gap at most once in a wish of ours."""
        step, gaps = 0, []

        def between(argv: Sequence[str]) -> None:
            nonlocal step
            for at, act in others:
                if at != step:
                    continue
                in_a_gap = list(argv[:2]) == ["scontrol", "update"]
                if in_a_gap and gaps:
                    continue
                before = self.slurm.updates
                self.admin(act)
                if in_a_gap and self.slurm.updates > before:
                    gaps.append(act[2])
            step += 1

        self.slurm.between = between
        return gaps

    def _judge(self, result: DrainResult, name: str, gaps: list[str]) -> None:
        self.slurm.between = lambda argv: None
        if gaps:
            assert result in ("contested", "overtaken", "storm", "unknown"), result
            self.hit |= {name} & self.held.keys()

    @invariant()
    def the_administrators_drains_are_in_force(self) -> None:
        nodes = self.slurm.nodes if self.held else {}
        for name, reason in self.held.items():
            node = nodes[name]
            assert node.drain or node.base == "DOWN"
            if name in self.hit:  # the one loss that is left: its text, and then nobody but a person resumes it
                assert read_reason(node.reason) is None
            else:
                assert node.reason == reason
