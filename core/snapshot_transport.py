"""How snapshots go to other nodes, as users choose it (``ckpt.replication.fabric``). The command line imports it."""

from typing import Literal

SnapshotTransport = Literal["auto", "tcp", "fabric"]
