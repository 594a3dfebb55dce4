"""Say on this node, as root's health checks do, that one of its GPUs has memory errors: a drill without any real GPU.

Run as a script by root on a node of a dev cluster, whose GPUs are fake.
"""

from __future__ import annotations

import socket
import sys
import time

from resilio_hpc.prolog_epilog.base.check import Fault, NodeVerdict, Result
from resilio_hpc.prolog_epilog.base.node import boot_id, uptime_s
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache

DEVICE = "GPU-d1111111-0000-0000-0000-000000000000"


def main(index: int) -> None:
    """Keep the verdict. Raises HealthError where that is not possible."""
    now = uptime_s()
    fault = Fault("a drill: uncorrected memory errors", DEVICE, index, "evict")
    result = Result(check="gpu-ecc", status="fail", severity="error", on_fail="evict", faults=(fault,), uptime_s=now)
    VerdictCache().write(
        NodeVerdict(
            node=socket.gethostname(),
            boot=boot_id(),
            uptime_s=now,
            unix_s=time.time(),
            results=(result,),
            gpus=index + 1,
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
