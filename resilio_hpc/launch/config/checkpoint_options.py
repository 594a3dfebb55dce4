"""Which checkpoints a run keeps, and where it writes them: part of its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from resilio_hpc.core.snapshot_transport import SnapshotTransport
from resilio_hpc.launch.config.flags import number, run_flag, whole_number

DEFAULT_KEEP_CHECKPOINTS = 5


@dataclass(frozen=True)
class CheckpointOptions:
    """The first four are ``ckpt.retention.Retention``; sizes are in gigabytes."""

    keep_checkpoints: int = run_flag(
        "newest checkpoints kept (default: 5)", DEFAULT_KEEP_CHECKPOINTS, whole_number, metavar="N", least=1
    )
    keep_every: int = run_flag(
        "also keep checkpoints of steps that K divides",
        0,
        whole_number,
        raw=None,
        reads=lambda steps: steps or 0,
        metavar="K",
        least=1,
    )
    keep_hours: float | None = run_flag(
        "of those, keep none committed more than H hours ago", None, number, metavar="H", above=0
    )
    keep_gb: float | None = run_flag(
        "of those, keep as many as fit into G gigabytes; the oldest go first, the newest always stays",
        None,
        number,
        metavar="G",
        above=0,
    )
    checkpoint_gb_per_s: float | None = run_flag(
        "each node writes checkpoints to the shared file system at this many GB per second, at most",
        None,
        number,
        metavar="N",
        above=0,
        names="--checkpoint-gb-per-s",
    )
    partner_copies: bool = run_flag("keep snapshots in another node's memory, too: to lose one costs less", False, None)
    snapshot_transport: SnapshotTransport = run_flag(
        "how snapshots go to other nodes; tcp: encrypted; fabric: read from memory by libfabric, not encrypted; auto: "
        "fabric where it has RDMA hardware, else tcp (default: tcp)",
        "tcp",
        choices=get_args(SnapshotTransport),
    )
    keep_local: int = run_flag(
        "newest committed steps kept in --local-checkpoints, beside the one being written (default: 1)",
        1,
        whole_number,
        metavar="N",
        least=1,
    )
    local_checkpoints: str = run_flag(
        "write checkpoints to this directory on each node's own disk (NVMe) first, and restore from there",
        "",
        raw=None,
        reads=None,
        metavar="DIR",
    )
    checkpoint_dir: str = run_flag(
        "keep checkpoints there, not in the run directory: s3://BUCKET/PREFIX of an object store, or a directory",
        "",
        raw=None,
        reads=None,
        metavar="PLACE",
    )
