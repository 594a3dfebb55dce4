"""The agent's partner copies: another node's snapshots in this node's memory, and copies fetched for its ranks.

A node that writes a step to disk also copies its partner's snapshots of that step, in the background, through the
replicator. When a node is lost, its successor fetches them while its ranks initialise (``ckpt.replicator``). Without
``--partner-copies`` only replica copies are kept (``ckpt.replication.replica_copies``), where ranks hold the same
tensors. They are good while this node's own snapshots of the step are there, so each new step is copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from resilio_hpc.ckpt.replication.messages import (
    Begin,
    Cancel,
    Fetch,
    Fetched,
    FetchFailed,
    LostMade,
    Request,
    ServeSnapshots,
    Serving,
    StillFetching,
    decode_answer,
)
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.core.snapshot_transport import SnapshotTransport
from resilio_hpc.launch.agent.decisions.node_ranks import NodeRanks
from resilio_hpc.launch.agent.snapshots.copies_under_way import CopyUnderWay, RestoreUnderWay
from resilio_hpc.launch.agent.snapshots.partner_records import RecordsFollowed
from resilio_hpc.launch.agent.snapshots.replica_schedule import ReplicaSchedule
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.process.child_link import ChildLink
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.message_parts import Partner
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.node_context import NodeContext

MAX_DEATHS = 5
SILENT_S = 60.0
"""A replicator tells every second that it is fetching, but not while it still takes memory for what was given up."""
DIED = "the replicator process was killed"


class PartnerCopies:
    """Keeps copies of the partner's snapshots: all of them with ``--partner-copies``, else what is no replica."""

    def __init__(self, node: NodeContext, ranks: NodeRanks, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = 0
        """Where others may fetch; 0: nowhere."""
        self.link = ChildLink("ckpt.replication.replicator", node.local_dir / "replicator.log")
        self._node = node
        self._ranks = ranks
        self._clock = clock
        self._keeps_all = node.options.checkpoints.partner_copies
        used = not self._keeps_all and node.options.mode != Mode.OBSERVE
        self._replicas = ReplicaSchedule(node.arena_dir, used, clock)
        self._held: dict[tuple[int, int], int] = {}  # (rank, step) → world size
        self._records = RecordsFollowed(self._say)
        self._number = 0
        self._copy: tuple[int, CopyUnderWay] | None = None
        self._restore: RestoreUnderWay | None = None
        self._deaths = 0
        self._life = m.NO_LIFE  # the life that this node has begun
        self._heard_at = 0.0  # when the replicator last sent something

    def start(self) -> None:
        """Start the replicator, if it is known to be needed."""
        if not (self._keeps_all or self._replicas.found) or self._deaths > MAX_DEATHS:
            return
        node = self._node
        self.link.start()
        spill = node.local_dir / "copies"
        wanted = node.options.checkpoints.snapshot_transport
        transport: SnapshotTransport = "tcp" if self._deaths else wanted  # a driver may have killed it
        self._say(
            ServeSnapshots(
                node.run.secret.decode().strip(), node.settings.address, str(node.arena_dir),
                str(node.arena_dir / "copies"), str(spill), transport=transport,
            )
        )  # fmt: skip
        self._say_begun()
        self._records.say_again()

    def held(self) -> tuple[m.Held, ...]:
        """Return the whole copies of the present life."""
        held = sorted(self._held.items())
        if held and not self._keeps_all:
            own = {snapshot.step for snapshot in arena.scan(self._node.arena_dir)}
            held = [(key, world) for key, world in held if key[1] in own]
        return tuple(m.Held(rank, step, world, True) for (rank, step), world in held)

    def begin(self, life: m.Life, step: int) -> None:
        """Begin ``life``, which goes on from ``step``: later copies do not count, and arenas hold no later step.

        Requests of earlier rounds get nothing.
        """
        self.give_up()
        self._held = {key: world for key, world in self._held.items() if key[1] <= step}
        self._life = life
        self._say_begun()

    def _say_begun(self) -> None:
        if self._life != m.NO_LIFE:
            self._say(Begin(self._life, list(self._held)))

    def give_up(self) -> None:
        """Stop the fetch of a round that is over."""
        numbers = [] if self._restore is None else list(self._restore.missing)
        self._restore = None
        self._replicas.begin()
        self._cancel(numbers)
        self._cancel_copy()

    def _cancel_copy(self) -> None:
        copy, self._copy = self._copy, None
        self._cancel([copy[0]] if copy is not None else [])

    def _cancel(self, numbers: list[int]) -> None:
        if numbers:
            self._say(Cancel(numbers))

    def keep(self, message: m.PersistStep, world_size: int) -> None:
        """Copy the partner's snapshots of a step. A newer step replaces a copy that is still under way."""
        if message.partner is not None:
            self._keep(message.partner, (message.epoch, message.round), message.step, world_size)

    def follow(self, message: m.KeepCopies, world_size: int) -> None:
        """Keep replica copies of the partner's snapshots, of each step from now on, and records of its boundaries."""
        self._replicas.follow(message, world_size)
        self._records.follow(message.partner, world_size)

    def make_lost(self, step: int, then: Callable[[], None]) -> None:
        """Have snapshots of the partner's ranks of a step, if this node's ranks have it; ``then``: it is seen which."""
        if not (self.link.takes and self._records.ask(step, then)):
            then()

    def _keep(self, partner: Partner, life: m.Life, step: int, world_size: int) -> None:
        ranks = range(partner.first_rank, partner.first_rank + partner.ranks)
        if not self.link.takes or all(self._held.get((rank, step)) == world_size for rank in ranks):
            return  # this life's own copy, older than its start
        self._cancel_copy()
        newest = max((step for _, step in self._held), default=-1)
        # the newer copy replaces the older one
        self._held = {key: world for key, world in self._held.items() if key[1] == newest}
        number = self._ask(step, list(ranks), world_size, partner.endpoint, life)
        self._copy = (number, CopyUnderWay(step, ranks, world_size))

    def fetch(self, local: LocalRound, start: m.Start) -> bool:
        """Fetch the snapshots that ranks of this node are to restore, if any. Return False if that is impossible."""
        ours = {rank.rank for rank in local.ranks.values()}
        wanted: dict[str, list[int]] = {}
        for fetch in start.fetches:
            if fetch.rank in ours and fetch.endpoint:
                wanted.setdefault(fetch.endpoint, []).append(fetch.rank)
        if not wanted or start.restore is None:
            return True
        if not self.link.takes and self._replicas.begin_fetch():
            self.start()  # a spare node had no use for it
        if not self.link.takes:
            self._ranks.copies_failed(local.number, start.restore, DIED)
            return False
        self._restore = restore = RestoreUnderWay(local.number, start.restore)
        self._heard_at = self._clock()
        world = sum(member.local_world_size for member in start.state.members)
        for endpoint, ranks in wanted.items():
            restore.missing.add(self._ask(start.restore.step, ranks, world, endpoint, owner=local.member))
        return True

    def when_brought(self, step: int, act: Callable[[], None]) -> None:
        """Call ``act`` once this node's snapshots of ``step`` are here, at once if they are.

        If they do not come, it is never called: another round begins.
        """
        if self._restore is not None and self._restore.point.step == step:
            self._restore.then.append(act)
        else:
            act()

    def tick(self) -> None:
        """Give up a fetch that takes too long, as with a replicator that is stopped. Copy replicas of a new step."""
        self._copy_replicas()
        if self._restore is not None and self._clock() - self._heard_at > SILENT_S:
            self.link.end()
            self._died()

    def _copy_replicas(self) -> None:
        local = self._ranks.local
        if self._replicas.look(local):
            self.start()
        order = self._replicas.due(local) if self._copy is None and self._restore is None else None
        if order is not None and local is not None:
            self._keep(order.partner, local.life, local.snapshot_whole, order.world_size)

    def serve(self) -> None:
        """Take the replicator's answers."""
        lines = self.link.read()
        if lines is None:
            self._died()
            return
        self._heard_at = self._clock()
        for line in lines:
            answer = decode_answer(line)
            if isinstance(answer, StillFetching):
                continue
            if isinstance(answer, Serving):
                self.port = answer.port
            elif isinstance(answer, LostMade):
                self._held |= {(rank, answer.step): answer.world_size for rank in answer.ranks}
                self._records.answered(answer.number)
            elif self._copy is not None and answer.number == self._copy[0]:
                _, copy = self._copy
                self._copy = None
                self._copied(copy, answer)
            elif self._restore is not None and answer.number in self._restore.missing:
                self._brought(self._restore, answer)

    def _copied(self, copy: CopyUnderWay, answer: Fetched | FetchFailed) -> None:
        """Take the result of a copy; of replica copies only a life's first is recorded."""
        if isinstance(answer, Fetched):
            self._keep_copy(copy)
            self._replicas.over(answer.seconds)
            if self._replicas.is_worth_telling():
                self._node.record(
                    "copied", step=copy.step, ranks=[copy.ranks.start, copy.ranks.stop - 1],
                    size_bytes=answer.size_bytes, seconds=answer.seconds, by=answer.by,
                )  # fmt: skip
            return
        self._replicas.over(0.0)
        if not self._replicas.used or answer.no_replicas:  # else its ranks may have been a little behind
            self._node.record("copy_failed", step=copy.step, error=answer.error)
        if answer.no_replicas:
            self._replicas.none()
            self.link.end()
            self.port = 0

    def _keep_copy(self, copy: CopyUnderWay) -> None:
        """Keep a finished copy, unless its ranks have another partner by now."""
        kept = {key: world for key, world in self._held.items() if key[0] in copy.ranks}
        self._held = kept | {(rank, copy.step): copy.world_size for rank in copy.ranks}

    def _brought(self, restore: RestoreUnderWay, answer: object) -> None:
        if isinstance(answer, Fetched):
            self._node.record("fetched", seconds=answer.seconds, size_bytes=answer.size_bytes, by=answer.by)
            restore.missing.discard(answer.number)
            if not restore.missing:
                self._restore = None
                for act in restore.then:
                    act()
        else:
            self._restore_failed(restore, getattr(answer, "error", DIED))

    def _restore_failed(self, restore: RestoreUnderWay, error: str) -> None:
        self.give_up()  # stops the other fetches
        self._ranks.copies_failed(restore.round, restore.point, error)

    def _died(self) -> None:
        """Start a new replicator, which serves the copies that are still there."""
        self._node.record("replicator_died")
        self._deaths += 1
        self.port = 0
        if not self._keeps_all:
            self._held.clear()  # they were in its memory
        restore = self._restore
        self._restore = self._copy = None  # no fetch is left that could be cancelled
        if self._deaths > MAX_DEATHS:
            self._node.say(
                f"{self._node.name}: the replicator died {self._deaths} times, there are no partner copies "
                f"here any more; see {self._node.local_dir / 'replicator.log'}"
            )
        self.start()
        if restore is not None:
            self._restore_failed(restore, DIED)

    def _ask(
        self,
        step: int,
        ranks: list[int],
        world: int,
        endpoint: str,
        life: m.Life = m.NO_LIFE,
        owner: m.Member | None = None,
    ) -> int:
        self._number += 1
        mine = (True, owner.first_rank, owner.local_world_size) if owner is not None else (False, 0, 0)
        as_replicas = owner is None and not self._keeps_all
        self._say(Fetch(self._number, step, ranks, world, endpoint, life, *mine, as_replicas))
        return self._number

    def _say(self, request: Request) -> None:
        if self.link.takes:
            self.link.write(encode_line(request))

    def close(self) -> None:
        """End the replicator."""
        self.link.close()
