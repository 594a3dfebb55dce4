"""Fetches the facts of a decision to resize, from the run directory and from Slurm. Every call is bounded."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from resilio_hpc.autoparallel import Inventory, Measurement, Pool, fit, take_inventory
from resilio_hpc.autoparallel.measure.throughput import BatchRule, RunSpeed
from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import ResilioError, SlurmError, UsageError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event, LedgerReader
from resilio_hpc.launch.chain import joining, node_exclusion
from resilio_hpc.launch.chain.continuation_policy import CONTINUES
from resilio_hpc.launch.chain.joining import LaunchRecord
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.rank_layout import is_auto, model_parallel
from resilio_hpc.launch.resize.facts import JoinerJob, JoinerState, Phase, ResizeFacts, Successor
from resilio_hpc.launch.resize.history import ResizeHistory, read_history
from resilio_hpc.launch.resize.policy import ResizePolicy
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.launch.rundir.controller_view import ControllerView
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.gpu_utilisation import GpuLooks
from resilio_hpc.slurm.client.model import Job
from resilio_hpc.slurm.client.user_limits import NodeLimit, fetch_limits, nodes_left
from resilio_hpc.slurm.submit.joiner_job import joiners_of

if TYPE_CHECKING:
    from resilio_hpc.autoparallel.search.model_speed import SpeedModel

LIMITS_S = 600.0  # limits of accounting change seldom
PULSE_S = 3.0  # a living controller's pulse moves twice a second


@dataclass(frozen=True)
class ResizeLimits:
    """Limits from the user of ``resilio resize``. 0: the run's own limits hold."""

    min_nodes: int = 0
    max_nodes: int = 0
    global_batch: int = 0
    micro_batch: int = 1
    rule: BatchRule = "keep"
    gpus: bool = False  # also read the load of the GPUs
    model: SpeedModel | None = None  # in place of the curve through step times


class ResizeView:
    """Looks at one run again and again. ``watches``: it remembers from look to look how long nodes have been idle."""

    def __init__(self, path: Path, client: SlurmClient, limits: ResizeLimits, policy: ResizePolicy) -> None:
        try:
            self.run = joining.find_run(path)
        except UsageError as error:
            raise UsageError(str(error).replace("--join ", "resilio resize ", 1)) from None
        self.path = self.run.path
        self.history = ResizeHistory()
        self.record: LaunchRecord | None = None
        self._client = client
        self._limits = limits
        self._policy = policy
        self._controller = ControllerView(self.path)
        self._ledger = LedgerReader(self.path / "ledger")
        self._events: list[Event] = []
        self._idle_since: dict[str, float] | None = None
        self._accounted: tuple[NodeLimit, ...] | None = None
        self._limits_until = float("-inf")
        self._gpus = GpuLooks(2 * policy.look_s)
        self._cluster = ""
        self._faulty: frozenset[str] = frozenset()

    def watch(self) -> None:
        """From now on, count only nodes that were seen idle for a while."""
        self._idle_since = {}

    def facts(self) -> ResizeFacts:
        """Return the facts.

        Raises UsageError where the run cannot be resized, SlurmError where Slurm does not answer.
        """
        record = self.record = self._record()
        leads = self._leads()
        status = Fields.of(trusted_files.read_object(self.path / "status.json")) if leads else Fields({})
        self._events = sorted([*self._events, *self._ledger.read_new()], key=lambda event: event.time)
        self.history = read_history(self._events)
        jobs = self._client.jobs()
        inventory = take_inventory(self._client.nodes(), self._client.partitions(), jobs)
        now = time.time()
        own = next((job for job in jobs if str(job.id) == record.job), None)
        successor = self._successor(record, jobs)
        phase = self._phase(record, leads, status, own, successor is not None)
        joiners = tuple(
            joiner_of(job, self.history, now) for job in joiners_of(self.run.run_id, os.geteuid(), jobs)
        )  # fmt: skip
        return self._put_together(record, status, inventory, own, successor, phase, joiners, jobs, now)

    def _put_together(
        self, record: LaunchRecord, status: Fields, inventory: Inventory, own: Job | None, successor: Job | None,
        phase: Phase, joiners: tuple[JoinerJob, ...], jobs: Sequence[Job], now: float,
    ) -> ResizeFacts:  # fmt: skip
        members = status.each("members")
        held = frozenset(status.inner("agents").data) - frozenset(status.texts("lost"))
        names = [member.text("node") for member in members]
        partition = own.partition if own is not None else successor.partition if successor is not None else ""
        anywhere = [*names, *(own.nodes if own is not None else ())]
        pool = next((found for node in anywhere if (found := inventory.pool_of(node, partition))), None)
        least, most = self._bounds(record)
        ranks = max((member.whole("local_world_size") or 0 for member in members), default=0) or 1
        return ResizeFacts(
            phase=phase, nodes=len(members), least=least, most=most, unit=record.options.node_unit,
            own_nodes=self.history.own_nodes, held=held, ranks_per_node=ranks, partition=partition,
            inventory=inventory, spares=record.options.spares,
            gpu_type=pool.gpu_type if pool else None, gpus_per_node=pool.gpus_per_node if pool else None,
            ends_in_s=own.end_time - now if own is not None and own.end_time else None,
            idle_for_s=self._idle_for(inventory), joiners=joiners,
            own_jobs=frozenset([record.job, *names_of(joiners), *([successor.address] if successor else [])]),
            user_nodes=nodes_of_user(jobs, os.geteuid()), quota_nodes=self._quota(own, jobs, pool),
            gpu_utilisation=self._busy(record.job) if phase == "training" and pool and pool.gpus_per_node else None,
            throughput=self._speed(record, pool, ranks, len(members), status), restart_s=self.history.restart_s,
            last_resize_s=None if self.history.last_resize is None else max(0.0, now - self.history.last_resize),
            lost_joiners=self.history.lost_in_a_row(names_of(joiners), now - self._policy.lost_joiners_s),
            successor=None if successor is None else Successor(
                successor.address, successor.node_count or 1, successor.reason in ("Resources", "Priority")
            ),
            model_parallel=_copy_ranks(record.options, len(members) * ranks),
            avoided=self._avoided(), global_batch=self._limits.global_batch, micro_batch=self._limits.micro_batch,
        )  # fmt: skip

    # -- the run directory -------------------------------------------------------------------------------------------

    def _record(self) -> LaunchRecord:
        try:
            record = joining.read_record(self.path)
        except UsageError as error:
            raise UsageError(str(error).replace("--join: ", "", 1)) from None
        if record is None:
            raise UsageError(f"the run in {self.path} has not begun (no {joining.FILE})")
        if not record.job.isdecimal():
            raise UsageError(f"the run in {self.path} is no Slurm job ({record.job}): there is nothing to resize")
        return record

    def _leads(self) -> bool:
        """Return whether a controller's pulse is seen to move."""
        deadline = time.monotonic() + PULSE_S
        while not self._controller.look():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _phase(self, record: LaunchRecord, leads: bool, status: Fields, own: Job | None, has_next: bool) -> Phase:
        verdict = run_directory.read_verdict(self.path, record.key)
        if verdict is not None:
            goes_on = str(verdict.get("verdict")) in CONTINUES and has_next
            return "between_jobs" if goes_on else "over"
        if not leads and (own is None or own.state.ended):
            return "between_jobs" if has_next else "over"
        return "training" if leads and status.text("phase") == "running" and self.history.trains else "settling"

    def _bounds(self, record: LaunchRecord) -> tuple[int, int]:
        options, limits = record.options, self._limits
        return max(options.min_nodes, limits.min_nodes), min(options.max_nodes, limits.max_nodes or options.max_nodes)

    def _speed(
        self, record: LaunchRecord, pool: Pool | None, ranks: int, nodes: int, status: Fields
    ) -> RunSpeed | None:  # fmt: skip
        """Return the curve through the run's step times, or the planner's, which they scale."""
        steps = list(self.history.steps)
        if nodes and nodes not in {one.nodes for one in steps}:
            agents = status.inner("agents")
            last = max((agents.inner(name).number("step_s") or 0.0 for name in agents.data), default=0.0)
            steps += [Measurement(nodes, last)] if last > 0 else []
        if not steps or not nodes:
            return None
        if self._limits.model is not None:
            rows = () if is_auto(record.options) else record.options.layouts
            gpu = (pool.gpu_type, pool.gpus_per_node) if pool else ("", 0)
            return self._limits.model.speed(
                steps, nodes, ranks, gpu, lambda world: model_parallel(rows, world) if rows else None
            )
        return fit(steps, self._policy.communication_share, self._limits.rule, max(1, self.history.own_nodes))

    def _avoided(self) -> frozenset[str]:
        """Return the nodes to avoid; where they cannot be read, the last known ones."""
        self._cluster = self._cluster or node_exclusion.cluster_name()
        with contextlib.suppress(ResilioError, OSError):
            self._faulty = node_exclusion.faulty_nodes(self.path, self.run.run_id, self._events, self._cluster)
        return self._faulty

    # -- Slurm ---------------------------------------------------------------------------------------------------------

    def _successor(self, record: LaunchRecord, jobs: Sequence[Job]) -> Job | None:
        """Return the next job of the chain, if it is pending and the user's own."""
        links = [link.job for link in chain.read_links(self.path)]
        following = links[links.index(record.job) + 1 :] if record.job in links else []
        return next(
            (job for job in jobs if str(job.id) in following and job.state.base == "PENDING"
             and job.user_id == os.geteuid()), None,
        )  # fmt: skip

    def _busy(self, job: str) -> float | None:
        return self._gpus.busiest(job, time.monotonic()) if self._limits.gpus else None

    def _quota(self, own: Job | None, jobs: Sequence[Job], pool: Pool | None) -> int | None:
        """Return the limit of accounting, which is read at intervals.

        Where it cannot be read, the last known one stands; without any, None, which is not taken for "no limit".
        """
        if own is None:
            return None
        if time.monotonic() > self._limits_until:
            try:
                self._accounted = fetch_limits(own.user, own.account, own.qos)
                self._limits_until = time.monotonic() + LIMITS_S
            except SlurmError:
                if self._accounted is None:
                    return 0
        return nodes_left(self._accounted or (), jobs, pool.gpus_per_node if pool else 0)

    def _idle_for(self, inventory: Inventory) -> Mapping[str, float] | None:
        if self._idle_since is None:
            return None
        now = time.monotonic()
        idle = {node for pool in inventory.pools for node in pool.idle}
        self._idle_since = {node: self._idle_since.get(node, now) for node in idle}
        return {node: now - since for node, since in self._idle_since.items()}


def _copy_ranks(options: LaunchOptions, ranks: int) -> int:
    """Return the ranks of one copy of the model; 1 with --layout auto, where each size has its own."""
    return 1 if is_auto(options) else math.prod(model_parallel(options.layouts, ranks))


def names_of(joiners: Sequence[JoinerJob]) -> list[str]:
    """Return the numbers of these jobs."""
    return [one.job for one in joiners]


def joiner_of(job: Job, history: ResizeHistory, now: float) -> JoinerJob:
    """Return the state of a joiner of this run. Pure."""
    name = job.address
    state: JoinerState
    if job.state.base == "PENDING":
        state, since = "pending", float(job.submit_time or now)
    elif job.state.base != "RUNNING" or "COMPLETING" in job.state.flags or name in history.told_to_end:
        state, since = "ending", history.told_to_end.get(name, now)
    elif name in history.asked_to_leave:
        state, since = "leaving", history.asked_to_leave[name]
    else:
        state, since = "running", float(job.start_time or now)
    return JoinerJob(name, job.node_count or len(job.nodes), job.nodes, state, max(0.0, now - since), job.reason)


def nodes_of_user(jobs: Sequence[Job], user_id: int) -> int:
    """Return how many nodes a user's jobs have, or ask for now, without jobs that wait for others or for a time.

    Pure.
    """
    counted = [
        job for job in jobs if job.user_id == user_id
        and (job.state.base == "RUNNING" or (job.state.base == "PENDING" and job.reason in ("Resources", "Priority")))
    ]  # fmt: skip
    return sum(job.node_count or 1 for job in counted)
