"""The agent's end of the process that reads ahead what its ranks will restore (``ckpt.read_ahead``).

The process is optional: the agent never waits for it, so it may hang with the file system, or die.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import msgspec

from resilio_hpc.ckpt.coordination.coordinator import is_read_ahead
from resilio_hpc.ckpt.restore.read_ahead import NEWEST, Done, ReadAhead
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.agent.snapshots.disk_link import DiskLink
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.node_context import NodeContext


class ReadAheadLink:
    """Runs one read-ahead process at a time, and reaps those that were killed."""

    def __init__(self, node: NodeContext, disks: DiskLink) -> None:
        self._node = node
        self._disks = disks
        self.begun = node.local_dir / "read-ahead"
        self._reader: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        self._ranks: tuple[int, ...] = ()
        self._is_guess = False

    def guess(self, slots: int, held: Sequence[m.Held]) -> None:
        """Read the newest step while torch is imported, unless memory has snapshots.

        It is read as if all nodes of the job took part.
        ``slots``: ranks of each node; ``held``: what this node's memory has.
        """
        settings = self._node.settings
        if settings.join or settings.node not in settings.expected or held:
            return
        first = settings.expected.index(settings.node) * slots
        world_size = min(len(settings.expected), settings.options.max_nodes) * slots
        if first < world_size:
            self._is_guess = True
            others = settings.expected if self._disks.port else ()
            self._read(NEWEST, world_size, tuple(range(first, first + slots)), others)

    def begin(self, local: LocalRound, start: m.Start) -> None:
        """Read the files that ranks of a decided round restore."""
        points = {rank.rank: start.restore_of(rank.rank) for rank in local.ranks.values()}
        ranks = tuple(rank for rank, point in points.items() if point is not None and point.source is Tier.COMMITTED)
        if start.restore is None or not ranks:
            return
        is_guessed = self._is_guess and ranks == self._ranks and is_read_ahead(self.begun, start.restore.step)
        self._is_guess = False
        if not is_guessed:
            world_size = sum(member.local_world_size for member in start.state.members)
            self._read(start.restore.step, world_size, ranks, tuple(self._disks.of_others(start)))

    def _read(self, step: int, world_size: int, ranks: tuple[int, ...], others: Sequence[str]) -> None:
        self._stop()
        self._ranks = ranks
        node = self._node
        request = ReadAhead(
            str(node.run.path / "checkpoints"), step, world_size, ranks, str(self.begun),
            node.options.checkpoints.local_checkpoints, tuple(others),
        )  # fmt: skip
        with (node.local_dir / "read-ahead.log").open("ab") as log:
            self._reader = subprocess.Popen(
                [*bootstrap.command("ckpt.restore.read_ahead"), msgspec.json.encode(request).decode()],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip

    def tick(self) -> None:
        """Take the process's results."""
        self._killed = [reader for reader in self._killed if reader.poll() is None]
        reader = self._reader
        if reader is None or reader.poll() is None:
            return
        self._reader = None
        assert reader.stdout
        with reader.stdout:
            said = reader.stdout.read()
        try:
            done = msgspec.json.decode(said, type=Done)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            done = Done(NEWEST, 0, 0.0, "its process died")
        if done.size_bytes or done.why_not:
            self._node.record("read_ahead", **msgspec.structs.asdict(done))

    def _stop(self) -> None:
        if self._reader is not None:
            assert self._reader.stdout
            self._reader.kill()
            self._reader.stdout.close()
            self._killed.append(self._reader)
            self._reader = None

    def close(self) -> None:
        """End the process without waiting for it: it may hang in the kernel."""
        self._stop()
