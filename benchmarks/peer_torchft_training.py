"""Data-parallel training in torchft's loop, for benchmarks/in_process.py: one replica group a rank, CPU and gloo.

peer_torchft_training.py MEGABYTES REPLICAS

Steps that all replicas took part in go to ``steps-rank<R>``, with the quorum as round; all steps go to ``all-rank<R>``.
The step in which a newcomer is healed counts: torchft commits it on all replicas.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from peer_model import STEP_S, PeerModel

MEGABYTES, REPLICAS, RANK = float(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
OUT = Path(os.environ["OUT"])
LIMIT = timedelta(seconds=30)

again = (OUT / f"steps-rank{RANK}").exists()
model = PeerModel(MEGABYTES, 2.0 if again else 1.0)
inner = torch.optim.AdamW(model.trained.parameters(), lr=1e-3)


def load(state: dict[str, dict[str, object]]) -> None:
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=LIMIT),
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=1,
    timeout=LIMIT,
    quorum_timeout=LIMIT,
    connect_timeout=LIMIT,
    init_sync=False,  # all ranks have the same already
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    hostname="127.0.0.1",
    replica_id=f"g{RANK}",
)
optimizer = Optimizer(manager, inner)
parallel = DistributedDataParallel(manager, model)


def quorum() -> tuple[int, int]:
    """Return the number of this step's quorum and of its replicas, one that is being healed included."""
    return manager._quorum_id, manager._pg.size()


with (
    (OUT / f"steps-rank{RANK}").open("ab", buffering=0) as together,
    (OUT / f"all-rank{RANK}").open("ab", buffering=0) as stamps,
):
    while True:
        began, before = time.monotonic(), manager.current_step()
        optimizer.zero_grad()
        parallel(torch.full((8, 64), float(before % 7))).square().mean().backward()
        optimizer.step()
        number, size = quorum()
        if (step := manager.current_step()) > before:
            line = f"{step} {time.time():.6f} {number}\n".encode()
            stamps.write(line)
            if size == REPLICAS:
                together.write(line)
                if again:
                    model.write_checksum(OUT / "checksums", RANK)
                    again = False
        time.sleep(max(0.0, began + STEP_S - time.monotonic()))
