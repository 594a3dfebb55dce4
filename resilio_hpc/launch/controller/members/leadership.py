"""The controller's part for its own term: whether it still leads, and whether its epoch is recorded. Pure."""

from __future__ import annotations

from resilio_hpc.launch.controller.facts.intents import EndAlone, HoldWitness, Intend, MayCommit
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import ClaimWitness, QueryHistory, RecordEpoch, StepDown
from resilio_hpc.launch.protocol.membership import has_quorum, witnesses_needed


class Leadership:
    """Covers a term from the election to the end of the leadership."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._fenced = run.term.first  # the epoch's file exists: older epochs are refused
        self._asked_witness = False
        self._witnesses: set[str] = set()

    def voters_settled(self) -> None:
        """Record the epoch: a quorum has stored which nodes vote in it."""
        if not self._fenced:
            self._out.act(RecordEpoch())

    def epoch_recorded(self) -> None:
        """Ask for the steps committed so far: the epoch's file is durable."""
        self._fenced = True
        self._out.act(QueryHistory())

    def informed(self) -> None:
        """Take note that the run directory has reported the run's history."""
        if self._fenced and not self._run.recorded:
            self._run.recorded = True
            self._intend(MayCommit())

    @property
    def is_over(self) -> bool:
        """Return whether the controller has had no quorum for too long."""
        run = self._run
        patience = run.config.join_timeout_s if self._never_led else 0.0
        limit = max(patience, run.config.heartbeat_timeout_s)
        return run.now() - max(run.supported_since, run.began) > limit

    @property
    def _never_led(self) -> bool:
        return self._run.term.first and not self._run.members

    def step_down(self) -> None:
        """Stop leading, since another node may lead by now. The agents elect again, this node included."""
        run = self._run
        present, voters = set(run.agents), run.membership
        if self._never_led and witnesses_needed(voters, present):
            self._go_on_with_half()
        elif self._never_led and not has_quorum(voters, present):
            reason = f"{len(present)} of {len(voters.nodes)} nodes joined within --join-timeout: half of them must"
            self._intend(EndAlone("not_enough_nodes", 1, reason))
        else:
            self._out.act(StepDown(run.supported_since, "no quorum"))

    def witness_claimed(self, witness: str, holder: str | None) -> None:
        """Take note which node holds the witness; its half of the nodes leads. None: no answer."""
        self._asked_witness = False
        if holder in self._run.agents:
            self._witnesses.add(witness)
            self._go_on_with_half()
        elif holder is not None:
            self._out.act(StepDown(self._run.supported_since, "the other half has the witness", outvoted=True))

    def _go_on_with_half(self) -> None:
        """Ask for the next witness that is needed. With all of them, the agents that are here are a quorum."""
        run = self._run
        needed = witnesses_needed(run.membership, run.agents)
        missing = [name for name in needed if name not in self._witnesses]
        if not missing:
            run.began = run.now()
            if needed:
                self._intend(HoldWitness())
        elif not self._asked_witness:
            self._asked_witness = True
            self._out.act(ClaimWitness(missing[0]))
