"""Data-parallel training in NVRx's in-process Wrapper, for benchmarks/in_process.py; one reserve rank, CPU and gloo.

peer_nvrx_training.py MEGABYTES ACTIVE_RANKS short|defaults

The model is made outside of the function and kept. What is left out needs CUDA: CUDA health checks, NCCL's abort.
``short``: what NVRx waits for between looks is 0.1 s in place of 1 s, and steps' collectives have 2 s in place of 10 s.
The latter is what ends a step: ending a gloo group from the monitor's thread does not free a rank that waits in it.
"""

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch.nn.parallel import DistributedDataParallel

from peer_model import STEP_S, PeerModel

MEGABYTES, ACTIVE, SHORT = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "short"
OUT = Path(os.environ["OUT"])
EACH = timedelta(seconds=0.1 if SHORT else 1)
STEP_LIMIT, HEAL_LIMIT = timedelta(seconds=2 if SHORT else 10), timedelta(seconds=30)


class LauncherStore(inprocess.store.TCPStore):
    """A client of the supervisor's store: with NVRx's own class rank 0 holds the store and must not die."""

    def __init__(self, **_: object) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        dist.TCPStore.__init__(
            self, address, port, is_master=False, timeout=timedelta(minutes=5), wait_for_workers=False
        )

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        return ()


model = PeerModel(MEGABYTES, 1.0 if int(os.environ["RANK"]) < ACTIVE else 2.0)
optimizer = torch.optim.AdamW(model.trained.parameters(), lr=1e-3)
done = 0 if int(os.environ["RANK"]) < ACTIVE else -1  # the reserve has no state


def heal(rank: int) -> bool:
    """Give the newest state to all: the small part by broadcast, the large one to ranks without; True for those."""
    global done
    dones: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(dones, done)
    source = dones.index(max(dones))
    small = [(done, model.trained.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(small, source)
    new = done < 0
    for other, theirs in enumerate(dones):
        if theirs < 0 and rank in (source, other):
            for part in model.large:
                if rank == source:
                    dist.send(part.detach(), other)
                else:
                    dist.recv(part.detach(), source)
    done = small[0][0]
    if rank != source:
        model.trained.load_state_dict(small[0][1])
        optimizer.load_state_dict(small[0][2])
    return new


@inprocess.Wrapper(
    store_factory=LauncherStore,
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(ACTIVE), inprocess.rank_assignment.ShiftRanks()
    ),
    monitor_thread_interval=EACH,
    monitor_process_interval=EACH,
    last_call_wait=EACH,
    progress_watchdog_interval=EACH,
    heartbeat_interval=EACH,
)
def main(call: inprocess.CallWrapper | None = None) -> None:
    global done
    assert call is not None
    rank, size, entry = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), call.iteration
    store = dist.PrefixStore(f"group{entry}", LauncherStore())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=HEAL_LIMIT)
    group = dist.new_group(timeout=STEP_LIMIT)
    new = heal(rank)
    dist.barrier()  # a step's limit does not begin before all are healed
    parallel = DistributedDataParallel(model, process_group=group, init_sync=False)
    with (OUT / f"steps-rank{rank}").open("ab", buffering=0) as stamps:
        while True:
            began = time.monotonic()
            optimizer.zero_grad()
            parallel(torch.full((8, 64), float(done % 7))).square().mean().backward()
            with call.atomic():  # an interruption in between would leave half a step
                optimizer.step()
                done += 1
                stamps.write(f"{done} {time.time():.6f} {entry}\n".encode())
            if new:
                threading.Thread(target=model.write_checksum, args=(OUT / "checksums", rank), daemon=True).start()
                new = False
            time.sleep(max(0.0, began + STEP_S - time.monotonic()))


main()
