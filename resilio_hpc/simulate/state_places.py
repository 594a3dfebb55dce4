"""Where a simulated run's state is: in nodes' memories, in copies, in the store. The real code chooses from it. Pure.

All nodes that were not struck hold the same, so a few of them stand for all: the choice needs who lacks what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.controller.checkpoints.replica_placement import InMemory, copier_rank, restore_choice
from resilio_hpc.launch.controller.facts.recovery import Recovery
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.simulate.constants import Constants
from resilio_hpc.simulate.node_places import NodePlaces
from resilio_hpc.simulate.virtual_run import VirtualRun


@dataclass(frozen=True)
class SimulatedRestore:
    """From where a round goes on. ``save_us``: ranks save their last step before; ``load_us``: of the slowest rank."""

    position: int
    source: str
    save_us: int
    load_us: int


class StatePlaces:
    """What can be restored. ``furthest``: the work that was done when the last round ended.

    ``state``: what the job's controller knows, which each job begins afresh.
    """

    def __init__(
        self, run: VirtualRun, places: NodePlaces, state: Callable[[], RunState], constants: Constants
    ) -> None:
        self._run, self._places, self._state, self._constants = run, places, state, constants
        self.furthest = 0
        self._whole = self._before = self._copied = self._last_step = -1
        self._bare: set[int] = set()  # places whose nodes have no snapshot
        self._resized = False
        self._pending = False  # the step that the round went on from is not durable yet
        self._saves = 0.0  # last steps that are to be saved, by their share
        self._on_disks = False  # this job's nodes have the committed step on their own disks

    # -- what happens --------------------------------------------------------------------------------------------

    def note(self, in_round_us: int) -> None:
        """Take note of what there is at the moment when a round ends."""
        run, saves = self._run, self._run.saves
        taken = saves.snapshots(in_round_us)
        self.furthest = run.position
        self._whole, self._before = run.position_of_save(taken), run.position_of_save(max(0, taken - 1))
        self._copied = run.position_of_save(saves.copied(in_round_us))
        trained, step_us = saves.trained(in_round_us), self._constants.us("step_s")
        self._last_step = run.position_of(trained // step_us * step_us)
        self._note_durable(in_round_us)
        self._bare, self._resized = set(), False

    def _note_durable(self, in_round_us: int) -> None:
        saves, state = self._run.saves, self._state()
        number = saves.durable(in_round_us)
        if number or (self._pending and in_round_us >= saves.durable_us):
            self._commit(self._run.position_of_save(number))
        assert state.committed <= self.furthest

    def _commit(self, position: int) -> None:
        state = self._state()
        if position > state.committed:
            state.learn([position])
            state.without_progress = 0
            self._on_disks = self._run.setup.local_disks

    def saved(self, position: int) -> None:
        """Take note that all is durable: the job ends."""
        self.furthest = position
        self._commit(position)

    def lost_at(self, place: int) -> None:
        """Take note that the node at a place has no snapshot."""
        self._bare.add(place)

    def size_changes(self) -> None:
        """Take note that the number of ranks changes."""
        self._resized = True

    def all_lost(self) -> None:
        """Take note that a job has new nodes."""
        self._whole = self._before = self._copied = self._last_step = -1
        self._bare, self._on_disks = set(), False

    def begin_round(self, restore: SimulatedRestore) -> None:
        """Take note that all ranks hold the state that they go on from."""
        self._pending = restore.position > self._state().committed
        self._bare, self._resized = set(), False
        self.furthest = self._whole = self._before = self._copied = self._last_step = restore.position

    # -- what is chosen ------------------------------------------------------------------------------------------

    def restore(self, recovery: Recovery | None, committed: int) -> SimulatedRestore:
        """Return what the next round restores."""
        setup, constants = self._run.setup, self._constants
        keeps_last = self._keeps_last_step(recovery)
        newest = self._last_step if keeps_last else self._whole
        choice = restore_choice(self._in_memory(newest), committed)
        node_gb = constants["gb_per_gpu"] * setup.gpus_per_node
        save_us = round(constants["gb_per_gpu"] * constants["snapshot_s_per_gb"] * 1e6) if keeps_last else 0
        if choice.point is None:
            return SimulatedRestore(0, "nothing", 0, 0)
        if choice.point.source is Tier.COMMITTED:
            if self._on_disks and not self._resized:
                seconds = max(
                    node_gb * constants["local_load_s_per_gb"], node_gb * len(self._bare) / constants["store_gb_s"]
                )
                return SimulatedRestore(choice.point.step, "the nodes' own disks", 0, round(seconds * 1e6))
            seconds = node_gb * len(self._places.members) / constants["store_gb_s"]
            return SimulatedRestore(choice.point.step, "the store", 0, round(seconds * 1e6))
        seconds = constants["gb_per_gpu"] * constants["memory_load_s_per_gb"]
        source = "memory"
        if any(fetch.endpoint for fetch in choice.fetches):
            seconds += node_gb * constants["fetch_s_per_gb"]
            source = "memory, lost nodes' from copies"
        elif choice.fetches:
            seconds += node_gb * len(choice.fetches) / constants["store_gb_s"]
            source = "memory, lost nodes' from the store"
        return SimulatedRestore(choice.point.step, source, save_us, round(seconds * 1e6))

    def _keeps_last_step(self, recovery: Recovery | None) -> bool:
        """Return whether ranks can save their last step before they end, by the rule of ``Rounds.prepare``.

        All of them, if none is lost; else those that hold the same as others.
        """
        setup = self._run.setup
        if recovery is None or not setup.last_step or self._last_step < 0:
            return False
        shared_alone = recovery.loses_state or self._resized
        if shared_alone and not setup.replicated:
            return False
        self._saves += self._constants["last_step_share"]
        saves = self._saves >= 1.0
        self._saves -= saves
        return saves

    def _in_memory(self, newest: int) -> InMemory:
        """Return what the nodes' memories hold, the nodes that were not struck drawn together."""
        setup = self._run.setup
        members = len(self._places.members)
        bare = sorted(place for place in self._bare if place < members)
        intact = min(members - len(bare), len(bare) + 1)
        found = InMemory(intact + len(bare))
        if newest < 0 or intact <= 0:
            return found
        if self._resized:
            if setup.replicated:
                found.shared = {newest}
            return found
        for step in {newest, self._whole, self._before}:
            found.own[step] = set(range(intact))
        for number, place in enumerate(bare, intact):
            if setup.replicated:
                found.elsewhere[newest][number] = "a replica"
            elif setup.partner_copies and copier_rank(place, members) not in self._bare:
                found.elsewhere[self._copied][number] = "a partner"
        return found
