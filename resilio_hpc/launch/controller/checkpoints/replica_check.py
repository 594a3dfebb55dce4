"""The controller's part for wrong results: replicas that differ, and what ranks found of a step. Pure.

A sweep without a difference verifies what was committed before it began: a changed bit of a parameter or an optimizer
state stays, and its part's turn came later. What is committed is not verified before. With ``--on-corruption restore``
a difference leads back to the newest verified step, and no newer one is restored.
"""

from __future__ import annotations

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.checkpoints.replica_sweeps import ReplicaDifference, ReplicaSweeps, SweepResult
from resilio_hpc.launch.controller.facts.intents import CorruptionFound, EndRun, Intend
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.protocol import messages as m

MOST_RANKS = 16
EXIT_CODE = 1


class ReplicaCheck:
    """Compares replicas, and keeps which steps are verified."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._sweeps = ReplicaSweeps()
        self._round = -1
        self._told: dict[str, tuple[int, ...]] = {}  # group → ranks that are known to differ
        self._gone_back = -1  # the verified step that ranks went back to last
        self._equal: dict[str, int] = {}  # group → the first boundary of its last sweep without a difference

    def take(self, message: m.ReplicasDigested | m.ResultJudged) -> None:
        """Take a message of this round."""
        if isinstance(message, m.ResultJudged):
            self._judged(message)
            return
        if self._round != self._run.round:
            self._round = self._run.round
            self._sweeps.clear()
            self._told.clear()
            self._equal.clear()
        for result in self._sweeps.take(message):
            self._compared(result)

    def _compared(self, result: SweepResult) -> None:
        found = result.difference
        if found is not None:
            self._differ(found)
            return
        self._told.pop(result.group, None)
        if result.whole and not self._told:
            self._equal[result.group] = result.begin
            self._verify()

    def tick(self) -> None:
        """Verify steps that were committed after the sweep which shows that they are right."""
        if self._equal and self._round == self._run.round:
            self._verify()

    def _verify(self) -> None:
        """Take note that what was committed before sweeps without a difference is right, as far as replicas tell."""
        run, before = self._run, min(self._equal.values(), default=-1)
        new = sorted(step for step in run.committed_steps - run.verified_steps if step <= before)
        run.verified_steps |= set(new)
        run.verified_steps &= run.committed_steps
        if new:
            self._out.record("step_verified", round=run.round, step=new[-1], by=before)

    def _differ(self, found: ReplicaDifference) -> None:
        run = self._run
        if self._told.get(found.group) == found.ranks:
            return
        self._told[found.group] = found.ranks
        self._verify()
        policy, verified = run.config.on_corruption, self._last_verified()
        self._out.record(
            "digests_differ", round=run.round, step=found.step, ranks=list(found.ranks[:MOST_RANKS]),
            nodes=self._nodes(found.ranks), certain=found.certain, replicas=found.replicas, group=found.group,
            tensor=found.tensor, part=found.part, parts=found.parts, verified=verified, policy=policy,
        )  # fmt: skip
        if policy == "report" or run.phase is not Phase.RUNNING or run.config.mode != Mode.RECOVER:
            return
        evidence = evidence_of(found)
        if policy == "stop":
            before = f"; step {verified} was committed before" if verified >= 0 else ""
            self._intend(EndRun("failed", EXIT_CODE, f"{evidence}{before}"))
        elif verified < 0:
            self._intend(EndRun("failed", EXIT_CODE, f"{evidence}; no committed step is known to be from before"))
        else:
            self._go_back(verified)
            self._intend(CorruptionFound(found.ranks, evidence, run.unix(), found.certain))

    def _last_verified(self) -> int:
        """Return the newest verified step; -1 without one.

        One that ranks went back to is none any more where they differ again before a newer one was verified.
        """
        verified = self._run.verified_steps
        if verified and max(verified) == self._gone_back:
            verified.discard(self._gone_back)
        return max(verified, default=-1)

    def _go_back(self, verified: int) -> None:
        """Let nothing newer than ``verified`` be restored."""
        run = self._run
        suspect = [step for step in run.committed_steps if step > verified]
        run.learn(bad_copies=[m.RestorePoint(Tier.COMMITTED, step) for step in suspect])
        run.not_after = self._gone_back = verified

    def _judged(self, message: m.ResultJudged) -> None:
        found, is_noise = message.judgement, message.judgement.verdict == "noise"
        known = {"rank": found.rank, "node": next(iter(self._nodes((found.rank,))), "")} if found.rank >= 0 else {}
        fields = {
            "signal": found.signal, "samples": found.samples, "module": found.module, "device": found.device
        }  # fmt: skip
        measured = {"difference": found.difference, "peer_difference": found.peer_difference}
        self._out.record(
            "noise_measured" if is_noise else "result_judged", round=self._run.round, step=found.step,
            verdict=found.verdict, **known, **{name: text for name, text in fields.items() if text},
            tries=found.tries, **{name: value for name, value in measured.items() if value >= 0}, said_by=message.rank,
        )  # fmt: skip

    def _nodes(self, ranks: tuple[int, ...]) -> list[str]:
        members = self._run.members
        return [member.node for member in members if any(rank in member.ranks for rank in ranks)][:MOST_RANKS]


def evidence_of(found: ReplicaDifference) -> str:
    """Return one line; of a rank that is to blame, as ``diagnose/causes/patterns.toml`` knows it."""
    where = f"at step {found.step} in {found.tensor or f'part {found.part} of {found.parts}'}"
    if found.certain:
        who = f"rank {found.ranks[0]}" if len(found.ranks) == 1 else f"ranks {', '.join(map(str, found.ranks))}"
        return f"silent corruption: {who} of {found.replicas} replicas differs from the others {where}"
    return f"{found.replicas} replicas differ {where}, and it is not known which of them is right"
