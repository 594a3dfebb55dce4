"""The open shard files of a committed step.

Good copies on the node's own disk come first, then good ones on other nodes' disks, then the committed files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.ckpt.tiers.peer_disks import Busy, PeerDisks, PeerFile
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.core.standard_streams import say
from resilio_hpc.core.tiers import Tier

Result = TypeVar("Result")
Read = TypeVar("Read", bound=tuple[Any, ...])


class ShardFiles:
    """Opens shard files. A copy is used while everything read from it matches the manifest and the tables.

    A copy that does not match is removed, and its reader reads the committed file from then on. Of a file on another
    node's disk the tensors come from there, and tables and trees, which are small, from the committed one.
    """

    def __init__(self, directory: Path, copies: Mapping[str, Path], peers: PeerDisks) -> None:
        """Open a step; ``directory``: its own. ``copies``: file name → the directory with a copy of it."""
        self._directory = directory
        self._copies, self._peers = copies, peers
        self._readers: dict[str, ShardReader] = {}
        self._local: set[ShardReader] = set()
        self._elsewhere: dict[ShardReader, PeerFile] = {}

    @property
    def tier(self) -> Tier:
        """Return the furthest tier that anything was read from: see ``source.CheckpointSource``."""
        if len(self._local) == len(self._readers):
            return Tier.LOCAL
        return Tier.PEER if len(self._local) + len(self._elsewhere) == len(self._readers) else Tier.COMMITTED

    def reader(self, shard: ShardRecord) -> ShardReader:
        """Return the file of a shard. Raises CorruptCheckpoint, OSError."""
        if shard.file not in self._readers:
            reader = self._open_copy(shard)
            if reader is not None:
                self._local.add(reader)
            else:
                reader = ShardReader(self._directory, shard)
                peer = self._peers.file(shard)
                if peer is not None:
                    self._elsewhere[reader] = peer
            self._readers[shard.file] = reader
        return self._readers[shard.file]

    def node_of(self, reader: ShardReader) -> str:
        """Return the node whose own disk has a file that this node's own has not; "": none."""
        return "" if reader in self._local else reader.shard.node

    def _open_copy(self, shard: ShardRecord) -> ShardReader | None:
        if shard.file not in self._copies:
            return None
        try:
            return ShardReader(self._copies[shard.file], shard, follow=False)
        except (CorruptCheckpoint, OSError) as error:
            self._remove(shard, error)
            return None

    def described(self, reader: ShardReader, act: Callable[[], Result]) -> Result:
        """Return the result of ``act``, which reads tables and trees; on damage, again from the committed file.

        Raises CorruptCheckpoint, OSError.
        """
        try:
            return act()
        except (CorruptCheckpoint, OSError) as error:
            if reader not in self._local:
                raise
            self._leave_copy(reader, error)
        return act()

    def read(self, reader: ShardReader | None, act: Callable[[PeerFile | None], Result]) -> Result:
        """Return the result of ``act``, which reads tensors; it gets the copy on another node's disk, if any.

        ``reader``: see ``by_copy``.
        """
        peer = self._elsewhere.get(reader) if reader is not None else None
        try:
            return act(peer)
        except (CorruptCheckpoint, OSError) as error:
            if reader is None:
                raise
            if peer is not None:
                del self._elsewhere[reader]
                self._leave_peer(peer, error)
            elif reader in self._local:
                self._leave_copy(reader, error)
            else:
                raise
        return act(None)

    def _leave_copy(self, reader: ShardReader, error: Exception) -> None:
        self._local.remove(reader)
        self._remove(reader.shard, error)
        reader.move_to(self._directory)

    def _leave_peer(self, peer: PeerFile, error: Exception) -> None:
        if isinstance(error, CorruptCheckpoint):
            peer.remove()
            error = CorruptCheckpoint(f"{peer.node}: {error}")
        if not isinstance(error, Busy):
            text = f"the copy of {peer.copy.file} on another node's disk is left: {error}"
            say(f"{text}; {self._directory} is read instead")

    def by_copy(self, reads: Iterable[Read]) -> Mapping[ShardReader | None, list[Read]]:
        """Return reads, which begin with a reader, by the copy that they use; None: committed files."""
        found: dict[ShardReader | None, list[Read]] = {}
        for read in reads:
            is_copy = read[0] in self._local or read[0] in self._elsewhere
            found.setdefault(read[0] if is_copy else None, []).append(read)
        return found

    def _remove(self, shard: ShardRecord, error: Exception) -> None:
        path = self._copies[shard.file] / shard.file
        try:
            path.unlink()
        except FileNotFoundError:
            return  # its writer was faster, or another rank, which has reported it
        except OSError:
            pass  # the disk is read-only, or has failed; the next life finds that too
        say(f"{path} is bad, {self._directory} is read instead: {error}")

    def close(self) -> None:
        """Close them all."""
        self._peers.close()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
