"""What an agent knows of a window of time of its ranks, and of its node. Few bytes: they are sent all the time."""

from __future__ import annotations

from typing import Annotated

import msgspec

Whole = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 48)]  # -1: not known
WINDOW_S = 5


class RankWindow(msgspec.Struct, frozen=True, array_like=True):
    """One rank in one window. Times in milliseconds.

    ``own``, ``wait``: outside and inside of collective calls, -1 where calls are not seen; ``rate``: KB/s of its
    fastest large call; ``queued``: its main thread could run, and no processor was free; ``throttled``: of its control
    group; ``blocked``: percent of looks in which its process, or a child, waited in the kernel for a device;
    ``collecting``: by Python's garbage collector.
    """

    own: Whole = -1
    wait: Whole = 0
    calls: Whole = 0
    steps: Whole = 0
    rate: Whole = 0
    queued: Whole = 0
    throttled: Whole = 0
    blocked: Whole = 0
    collecting: Whole = 0


class NodeFacts(msgspec.Struct, frozen=True, array_like=True):
    """A node in one window.

    ``storage``: milliseconds in which a process waited for storage (PSI); ``resent``: TCP segments sent again;
    ``sent``: all of them; ``trip``: microseconds of the fastest answer to a heartbeat, 0 without one; ``errors``: of
    its network devices; ``gpus_throttled``: GPUs that heat, power or the hardware hold down; ``throttle_reasons``: why,
    as bits of nvmlClocksEventReasons; ``backed_up``: percent of looks in which data waited for a network device to
    send it.
    """

    storage: Whole = 0
    resent: Whole = 0
    sent: Whole = 0
    trip: Whole = 0
    errors: Whole = 0
    gpus_throttled: Whole = 0
    throttle_reasons: Whole = 0
    backed_up: Whole = 0
