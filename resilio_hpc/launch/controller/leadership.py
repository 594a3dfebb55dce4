"""The controller's part for its own standing: whether it still leads, and whether its epoch is on record. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilio_hpc.launch.controller.state import ClaimWitness, RecordEpoch, StepDown
from resilio_hpc.launch.protocol.membership import has_quorum, witnesses_needed

if TYPE_CHECKING:
    from resilio_hpc.launch.controller.controller import Controller


class Tenure:
    """From the election to stepping down."""

    def __init__(self, controller: Controller) -> None:
        self.recorded = False  # older epochs cannot commit any more, and what they committed is known
        self.fenced = controller.term.first  # the epoch's file is there: they are refused
        self._controller = controller
        self._asked_witness = False
        self._witnesses: set[str] = set()

    def enrolled(self) -> None:
        """A quorum knows who votes in this epoch: it may go on record."""
        if not self.fenced:
            self._controller.act(RecordEpoch())

    def epoch_recorded(self) -> None:
        """The epoch's file is durable: what was committed until then is to be learnt."""
        self.fenced = True
        self._controller.ask_past()

    def informed(self) -> None:
        """The run directory has told its past."""
        if self.fenced and not self.recorded:
            self.recorded = True
            self._controller.checkpoints.epoch_recorded()

    @property
    def is_over(self) -> bool:
        """Whether no quorum has stood with us for too long."""
        controller = self._controller
        patience = controller.config.join_timeout_s if self._never_led else 0.0
        limit = max(patience, controller.config.heartbeat_timeout_s)
        return controller.now() - max(controller.enrolment.since, controller.began) > limit

    @property
    def _never_led(self) -> bool:
        return self._controller.term.first and not self._controller.members

    def step_down(self) -> None:
        """Others may lead by now; whoever is with us elects anew, with us if we can."""
        controller = self._controller
        present, voters = set(controller.agents), controller.enrolment.membership
        if self._never_led and witnesses_needed(voters, present):
            self._go_on_with_half()
        elif self._never_led and not has_quorum(voters, present):
            reason = f"{len(present)} of {len(voters.nodes)} nodes joined within --join-timeout: half of them must"
            controller.ending.finish_alone("not_enough_nodes", 1, reason)
        else:
            controller.act(StepDown(controller.enrolment.since, "no quorum"))

    def witness_claimed(self, witness: str, holder: str | None) -> None:
        """Whose the witness is; None: the run directory did not answer. It stands with its holder's half."""
        controller = self._controller
        self._asked_witness = False
        if holder in controller.agents:
            self._witnesses.add(witness)
            self._go_on_with_half()
        elif holder is not None:
            controller.act(StepDown(controller.enrolment.since, "the other half has the witness", outvoted=True))

    def _go_on_with_half(self) -> None:
        """Ask for the next witness that is needed; with all of them, those who came are enough."""
        controller = self._controller
        needed = witnesses_needed(controller.enrolment.membership, controller.agents)
        missing = [name for name in needed if name not in self._witnesses]
        if not missing:
            controller.began = controller.now()
            if needed:
                controller.enrolment.witness(controller.agents)
        elif not self._asked_witness:
            self._asked_witness = True
            controller.act(ClaimWitness(missing[0]))
