"""What the agent and its sampling process say to each other, as JSON lines."""

from __future__ import annotations

import msgspec

BEFORE, AFTER = "before", "after"


class Setup(msgspec.Struct, frozen=True):
    """The first line. ``port`` None: no endpoint; ``textfile`` "": none; ``token`` "": none is asked for.

    ``gpu_headroom_bytes`` None: a twentieth of the GPU's memory; 0: not watched.
    """

    node: str
    run_id: str
    run_path: str
    local_dir: str
    interval_s: float
    nodes: int = 1
    port: int | None = None
    address: str = "127.0.0.1"
    token: str = ""
    textfile: str = ""
    gpu_headroom_bytes: int | None = None


class RankFacts(msgspec.Struct, frozen=True):
    """What the agent knows of one rank. ``ring``: the file of its calls; ``step`` -1: it reports none."""

    rank: int
    pid: int
    ring: str = ""
    step: int = -1
    step_s: float = 0.0


class SampleRequest(msgspec.Struct, frozen=True):
    """A request for a sample. ``when``: before or after a round, where its counters are to be kept; else "".

    ``run``: values of the schema's part ``run``.
    """

    number: int
    ranks: tuple[RankFacts, ...] = ()
    run: dict[str, float] = {}
    when: str = ""


class MemoryNews(msgspec.Struct, frozen=True):
    """A level that was reached or left. ``level``: 0 as usual, 1 warning, 2 critical; ``before``: the one before.

    ``largest``: the rank with the most memory. ``full_in_s`` None: its use does not grow.
    """

    subject: str
    level: int
    before: int
    used_bytes: float
    limit_bytes: float
    grows_bytes_per_s: float = 0.0
    full_in_s: float | None = None
    largest: str = ""
    largest_bytes: float = 0.0


class Sampled(msgspec.Struct, frozen=True):
    """The answer to a request. ``notes``: what could not be done, each said once; ``endpoint``: its URL, once known.

    ``counters``: those of errors, where they were asked for. ``level`` and ``memory``: the worst memory level now, and
    what it is about. ``gpus_throttled``: GPUs whose clocks heat, power or the hardware hold down;
    ``throttle_reasons``: the bits of nvmlClocksEventReasons that say so.
    """

    number: int
    level: int = 0
    memory: str = ""
    news: tuple[MemoryNews, ...] = ()
    notes: tuple[str, ...] = ()
    endpoint: str = ""
    counters: dict[str, float] | None = None
    gpus_throttled: int = 0
    throttle_reasons: int = 0
