"""Looks at each step's result before the optimizer uses it, and does a suspect step again (NVX-6).

    guard = train.StepGuard(run, model, [optimizer])
    state = {"model": model, "optimizer": optimizer, "guard": guard}
    for step in run.steps(start, total, save=checkpoint.saver(state)):
        loss = guard.compute(step, forward_backward, batch)
        optimizer.step()

A suspect result (not finite, or a spike) is computed again in place, with the random numbers and buffers set back.
Where it comes again, the replicas compute each other's micro-batches. ``verdict`` judges. Parameters have not changed
meanwhile, so no tensor is copied, and the step ends with the right gradients.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from resilio_hpc.ckpt.coordination import agent_link
from resilio_hpc.core.errors import SuspectResult
from resilio_hpc.core.judgement import Judgement, StepVerdict
from resilio_hpc.core.rank_link import StepJudged
from resilio_hpc.train.validation.guard_state import GuardState, Pending
from resilio_hpc.train.validation.guarded_run import BoundarySaver, GuardedRun
from resilio_hpc.train.validation.healing import heal
from resilio_hpc.train.validation.measured import FirstBad, digest_gradients, loss_of, norm_of
from resilio_hpc.train.validation.packets import BatchWork, CannotTravel, packed, unpacked
from resilio_hpc.train.validation.peers import PeersOfRound, ReplicaPeers
from resilio_hpc.train.validation.rewind import Position, Rewindable
from resilio_hpc.train.validation.spikes import FACTOR, WARM_UP
from resilio_hpc.train.validation.verdict import StepFinding, StepOutcome, after_exchange, after_rerun, difference

Compute = Callable[[Any], Any]
END_S = 60.0
"""For how long ranks wait to be ended by the launcher, when another rank's device is faulty."""


class StepGuard:
    """Guards the steps of one rank. All ranks make one, and call ``compute`` at the same steps.

    It is part of the checkpoint: put it into the state. ``optimizers``: where those of one replica are corrupt, their
    states are copied from another one, as parameters are. ``rewinds``: objects whose position ``compute``'s function
    changes, such as a loader that it reads from. ``samples``: names the samples of a batch. ``signals``: further
    numbers to be judged, such as the largest attention logit. ``sample_every``: each so many steps the step is done
    again on this rank and on another one, and how much the results differ is reported (0: never).
    ``on_deterministic``: "go on" with a result that comes again on other devices, or "stop"; None: go on with finite
    ones. ``scaler``: the program's GradScaler, which handles gradients that are infinite. ``save``: of ``run.steps``,
    made by ``checkpoint.saver``; where there are no replicas, the step is then done again after a restart.
    """

    def __init__(
        self, run: GuardedRun, model: torch.nn.Module, optimizers: Sequence[Any] = (), *,
        rewinds: Sequence[Rewindable] = (),
        samples: Callable[[Any], str] | None = None, signals: Callable[[], Mapping[str, float]] | None = None,
        sample_every: int = 0, on_deterministic: Literal["go on", "stop"] | None = None,
        scaler: Any = None, save: BoundarySaver | None = None, warm_up: int = WARM_UP, factor: float = FACTOR,
    ) -> None:  # fmt: skip
        self._run = run
        self._model = model
        self._optimizers = optimizers
        self._rewinds = rewinds
        self._samples = samples
        self._signals = signals
        self._sample_every = sample_every
        self._policy = on_deterministic
        self._scaler = scaler
        self._save = save
        self._round = PeersOfRound(run)
        self._state = GuardState(warm_up, factor)
        self._tries = 0

    @property
    def _peers(self) -> ReplicaPeers:
        return self._round.now()

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how often each verdict was found."""
        return dict(self._state.counts)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, counted, and is still open, as plain values."""
        return self._state.to_plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` returned."""
        self._state.load(state)

    def compute(self, step: int, function: Compute, batch: Any = None) -> Any:
        """Return what ``function(batch)`` returns, its loss, once that is believed.

        The function sets gradients to zero, and does the forward and the backward pass; it takes no optimizer's step.
        What it sums over ranks, other than by DDP, it sums at every call, or better, after ``compute``. Raises
        SuspectResult on a rank whose device is faulty, and on all ranks where ``on_deterministic`` is "stop".
        """
        position = Position(self._model, self._rewinds)
        self._tries = 0
        result, outcome = self._once(function, batch)
        if self._state.pending is not None and self._state.pending.step == step:
            return self._resolve(step, self._state.pending, result, outcome)
        if self._peers.any_suspect(bool(outcome.why)):
            return self._investigate(step, function, batch, position, self._with_digest(outcome))
        if self._sample_every and step % self._sample_every == 0:
            return self._measure_noise(step, function, batch, position, self._with_digest(outcome))
        self._state.accept(self._values(outcome))
        return result

    def _once(self, function: Compute, batch: Any) -> tuple[Any, StepOutcome]:
        self._tries += 1
        result = function(batch)
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        outcome = StepOutcome(loss_of(result), norm_of(self._model) / scale, 0)
        return result, StepOutcome(outcome.loss, outcome.norm, 0, self._state.why_suspect(self._values(outcome)))

    def _values(self, outcome: StepOutcome) -> dict[str, float]:
        found = {"loss": outcome.loss, "gradient norm": outcome.norm}
        if self._scaler is not None and not math.isfinite(outcome.norm):
            del found["gradient norm"]  # the scaler leaves out such a step, and lowers its scale
        return {**found, **(self._signals() if self._signals is not None else {})}

    def _with_digest(self, outcome: StepOutcome) -> StepOutcome:
        return StepOutcome(outcome.loss, outcome.norm, digest_gradients(self._model), outcome.why)

    def _again(self, function: Compute, work: BatchWork, position: Position, sums: bool) -> tuple[Any, StepOutcome]:
        """Compute work from where it began. ``sums``: DDP sums the gradients, as in a step."""
        position.go_back()
        position.take(work.generators, work.buffers)
        no_sync = getattr(self._model, "no_sync", None)
        with contextlib.nullcontext() if sums or no_sync is None else no_sync():
            result, outcome = self._once(function, work.batch)
        return result, self._with_digest(outcome)

    # -- a suspect result --------------------------------------------------------------------------------------------

    def _investigate(self, step: int, function: Compute, batch: Any, position: Position, first: StepOutcome) -> Any:
        peers = self._peers
        own = BatchWork(batch, position.generators, position.buffers)
        bad = FirstBad()
        with bad.watching(self._model):
            result, again = self._again(function, own, position, sums=True)
        firsts, agains = peers.gather(first), peers.gather(again)
        signal = next((one.why for one in (*firsts, *agains) if one.why), "")
        if not peers.any_suspect(bool(again.why)):
            finding = after_rerun(firsts, agains, self._state.noise)
            self._found(step, finding or StepFinding("transient"), signal)
            self._state.accept(self._values(again))
            return result
        module = bad.or_gradient(self._model)
        if len(peers.replicas) == 1:
            self._alone(step, position, first, again, signal, module, batch)
            return result
        healed = heal(peers, (self._model, *self._optimizers))
        if peers.any_suspect(healed is not None):
            result, again = self._again(function, own, position, sums=True)
            if healed is not None:
                rank = healed.odd[0] if len(healed.odd) == 1 else -1
                self._found(step, StepFinding("corrupt", rank), signal, healed.name, batch)
            if not peers.any_suspect(bool(again.why)):
                self._state.accept(self._values(again))
                return result
        _, home = self._again(function, own, position, sums=False)
        away = self._exchanged(function, own, position)
        if away is None:
            finding = StepFinding("unresolved")
        else:
            homes, aways = peers.gather(home), peers.gather(away)
            aways = aways[1:] + aways[:1]  # in the order of the micro-batches
            finding = after_exchange(homes, aways, self._state.noise)
        result, final = self._again(function, own, position, sums=True)
        self._found(step, finding, signal, module if finding.verdict != "persistent" else "", batch)
        self._act(step, finding, signal)
        self._state.explain(self._values(final))
        self._state.accept(self._values(final))
        return result

    def _exchanged(self, function: Compute, own: BatchWork, position: Position) -> StepOutcome | None:
        """Return the outcome of the work of the replica before this one; None where batches cannot travel."""
        try:
            data, why = packed(own), ""
        except CannotTravel as error:
            data, why = b"", str(error)
        if self._peers.any_suspect(bool(why)):
            return None
        theirs = unpacked(self._peers.pass_on(data), own)
        _, outcome = self._again(function, theirs, position, sums=False)
        return outcome

    def _act(self, step: int, finding: StepFinding, signal: str) -> None:
        """Raise where this rank, or all ranks, must not go on."""
        if self._peers.any_suspect(finding.verdict == "persistent"):
            rank = self._peers.replicas[finding.rank] if finding.verdict == "persistent" else -1
            text = f"silent corruption: rank {rank} computes wrong results: {signal} at step {step}, and not elsewhere"
            if rank == self._peers.rank or not self._run.launched:
                raise SuspectResult(text)
            time.sleep(END_S)  # the launcher ends all ranks, once it has saved the last finished step
            raise SuspectResult(f"the launcher has not ended this rank: {text}")
        self._stop_or_go_on(step, signal, finding.verdict)

    def _stop_or_go_on(self, step: int, signal: str, verdict: StepVerdict) -> None:
        """Raise on all ranks where training must not go on with a result that comes again."""
        is_number = not (signal.endswith("NaN") or signal.endswith("infinite"))
        stops = self._policy == "stop" or (self._policy is None and not is_number)
        if self._peers.any_suspect(stops and bool(signal)):
            raise SuspectResult(f"step {step}: {signal or 'of other ranks'} ({verdict}): training does not go on")

    # -- without replicas ----------------------------------------------------------------------------------------------

    def _alone(
        self,
        step: int,
        position: Position,
        first: StepOutcome,
        again: StepOutcome,
        signal: str,
        module: str,
        batch: Any,
    ) -> None:
        """Leave the step to another device: save, with what is known, and end. Without ``save`` it stays unresolved."""
        changed = self._peers.any_suspect(difference(first, again) > self._state.noise)
        save = self._save
        is_held = save is not None and save.holds_boundary
        if save is not None and not self._peers.any_suspect(changed or not is_held):
            position.go_back()
            self._state.pending = Pending(step, again.loss, again.norm, again.digest, signal, self._device())
            self._run.save_last(step, lambda _: save.save_boundary(self))
            text = f"step {step}: {signal or 'a suspect result of another rank'}, twice on {self._device()}"
            raise SuspectResult(f"{text}: it is done again after a restart")
        self._found(step, StepFinding("unresolved"), signal, module, batch)
        self._stop_or_go_on(step, signal, "unresolved")
        self._state.explain(self._values(again))
        self._state.accept(self._values(again))

    def _resolve(self, step: int, open_: Pending, result: Any, outcome: StepOutcome) -> Any:
        """Judge a step that another process, of the job before perhaps, has left open."""
        now = self._with_digest(outcome)
        before = StepOutcome(open_.loss, open_.norm, open_.digest, open_.why)
        moved = self._peers.any_suspect(open_.device != self._device())
        changed = self._peers.any_suspect(difference(before, now) > self._state.noise)
        verdict: StepVerdict = "transient" if changed else "unresolved"
        if moved:
            verdict = "persistent" if changed else "deterministic"
        self._state.pending = None
        self._found(step, StepFinding(verdict, self._peers.at), open_.why, device=open_.device)
        if not changed:
            self._stop_or_go_on(step, open_.why, verdict)
        self._state.explain(self._values(outcome))
        self._state.accept(self._values(outcome))
        return result

    def _measure_noise(self, step: int, function: Compute, batch: Any, position: Position, first: StepOutcome) -> Any:
        """Do a step again here and on another rank, and report how much the results differ."""
        own = BatchWork(batch, position.generators, position.buffers)
        peer = -1.0
        if len(self._peers.replicas) > 1:
            _, home = self._again(function, own, position, sums=False)
            away = self._exchanged(function, own, position)
            if away is not None:
                homes, aways = self._peers.gather(home), self._peers.gather(away)
                pairs = zip(homes, aways[1:] + aways[:1], strict=True)
                peer = max(difference(*pair) for pair in pairs)
        result, again = self._again(function, own, position, sums=True)
        pairs = zip(self._peers.gather(first), self._peers.gather(again), strict=True)
        own_difference = max(difference(*pair) for pair in pairs)
        self._state.measured(own_difference)
        self._tell(Judgement(step, "noise", tries=self._tries, difference=own_difference, peer_difference=peer))
        self._state.accept(self._values(again))
        return result

    def _found(
        self, step: int, finding: StepFinding, signal: str, module: str = "", batch: Any = None, device: str = ""
    ) -> None:
        """Count a verdict, and tell the launcher, by the first replica that is not to blame."""
        self._state.count(finding.verdict)
        peers = self._peers
        about = finding.rank if finding.rank >= 0 else 0
        samples = self._samples(batch)[:100] if self._samples is not None and batch is not None else ""
        samples = peers.gather_texts(samples)[about]
        module = peers.gather_texts(module)[about]
        device = device or peers.gather_texts(self._device())[about]
        rank = peers.replicas[finding.rank] if finding.rank >= 0 else -1
        self._tell(
            Judgement(step, finding.verdict, rank, signal[:300], samples, module, device, self._tries), about=rank
        )

    def _tell(self, judgement: Judgement, about: int = -1) -> None:
        teller = next((rank for rank in self._peers.replicas if rank != about), self._peers.rank)
        is_own = bool(judgement.signal) or judgement.verdict == "noise"  # else another group has it
        if self._peers.rank == teller and is_own:
            link = agent_link.current(os.environ)
            if link is not None:
                link.send(StepJudged(judgement))

    def _device(self) -> str:
        return self._state.device_of(next(self._model.parameters(), None))
