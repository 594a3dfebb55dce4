"""What a torchrun script finds out about its process and its world, to "found.RANK": found_place.py env://|tcp://."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

rank = os.environ["RANK"]
handlers = {one.name: str(signal.getsignal(one)) for one in signal.valid_signals() if isinstance(one, signal.Signals)}
found = {
    "argv": sys.argv[1:], "file": __file__, "name": __name__, "spec": str(__spec__), "path": sys.path[0],
    "flags": str(sys.flags), "executable": sys.executable, "buffered": sys.stdout.line_buffering,  # type: ignore[union-attr]
    "threads": threading.active_count(), "thread": threading.current_thread().name,
    "session": os.getsid(0) == os.getpid(), "process": multiprocessing.current_process().name,
    "start method": multiprocessing.get_start_method(allow_none=True), "nice": os.nice(0), "handlers": handlers,
    "cpus": len(os.sched_getaffinity(0)), "hook": sys.excepthook is sys.__excepthook__,
    "torch": [torch.get_num_threads(), torch.cuda.is_initialized()], "elastic": dist.is_torchelastic_launched(),
    "names": sorted(name for name in os.environ if not name.startswith("RESILIO_")),
}  # fmt: skip
words = {}
if sys.argv[1] == "tcp://":
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    words = {"init_method": address, "rank": int(rank), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", **words)  # type: ignore[arg-type]
found["store"] = type(dist.distributed_c10d._get_default_store()).__name__
found["group"] = [dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank(), dist.get_backend()]
objects = [None, None]
dist.all_gather_object(objects, rank, group=dist.new_group([0, 1]))
found["objects"] = objects
dist.destroy_process_group()
with open(f"found.{rank}", "w") as file:
    json.dump(found, file)
