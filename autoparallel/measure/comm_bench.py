"""A small benchmark of collectives, one process per rank: ``python -m resilio_hpc.autoparallel.measure.comm_bench …``.

Started by ``resilio plan profile-comm``, in a job or on one machine. Rank 0 writes the profile.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from resilio_hpc.autoparallel.measure import profile_file
from resilio_hpc.autoparallel.measure.comm_backends import BACKENDS, Backend, open_backend
from resilio_hpc.autoparallel.measure.comm_fit import FACTORS, Curve, fit
from resilio_hpc.core.errors import ResilioError, UsageError

REPEATS = 7
SAMPLE_S = 0.02
"""A sample repeats the collective until it has taken about so long, at most MOST times."""
MOST = 50


def sizes_to(largest: int) -> list[int]:
    """Return 1 KiB, 4 KiB … up to ``largest`` bytes."""
    return [1 << power for power in range(10, 63, 2) if 1 << power <= largest]


def spread(sizes: Sequence[int]) -> list[int]:
    """Return smallest, largest, the middle, then the others: however few are measured, the line has two ends. Pure."""
    ends = [sizes[0], sizes[-1], sizes[len(sizes) // 2]] if len(sizes) > 2 else list(sizes)
    return [*ends, *(size for size in sizes if size not in ends)]


def groups_of(hosts: Sequence[str], collective: str) -> Mapping[str, list[list[int]]]:
    """Return, by span, the groups that are measured side by side; ``hosts[rank]``. Pure.

    Collectives: all ranks of each node; all ranks. Transfers: neighbours on a node; the same place on two nodes, all at
    a time, as between pipeline stages.
    """
    nodes = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    width = min(map(len, nodes))
    if collective != "send-recv":
        spans = {
            "node": nodes if width > 1 else [],
            "network": [sorted(rank for node in nodes for rank in node)] if len(nodes) > 1 else [],
        }
    else:
        inner = [node[at : at + 2] for node in nodes for at in range(0, len(node) - 1, 2)]
        pairs = zip(nodes[::2], nodes[1::2], strict=False)
        spans = {"node": inner, "network": [list(pair) for one, two in pairs for pair in zip(one, two, strict=False)]}
    return {span: groups for span, groups in spans.items() if groups}


def measure(backend: Backend, largest: int, curve_s: float, tell: Callable[[str], None]) -> list[Curve]:
    """Return all collectives over all spans, without those that the backend lacks, which are reported.

    Every rank calls it. ``curve_s``: when a curve has taken so long, sizes between its ends and its middle are left
    out.
    """
    hosts = backend.hosts()
    curves = []
    for collective in FACTORS:
        for span, groups in groups_of(hosts, collective).items():
            own = backend.split(groups)
            ranks = next((group for group in groups if backend.rank in group), [])
            per_node = max(sum(hosts[rank] == host for rank in groups[0]) for host in set(hosts))
            try:
                samples = _samples(backend, collective, own, ranks, sizes_to(largest), curve_s)
                curve = fit(collective, span, len(groups[0]), per_node, samples)  # of the same numbers on every rank
            except (NotImplementedError, UsageError) as error:
                tell(f"{collective} ({span}): left out, {str(error).splitlines()[0]}")
                continue
            curves.append(curve)
            tell(
                f"{collective:<14} {span:<8} {curve.ranks:>3} ranks  {curve.latency_s * 1e6:>9.1f} us  "
                f"{curve.bandwidth / 1e9:>8.2f} GB/s  fit within {curve.error:.0%}"
            )
    return curves


def _samples(
    backend: Backend, collective: str, group: object, ranks: Sequence[int], sizes: Sequence[int], curve_s: float
) -> dict[int, list[float]]:
    """Return the slowest rank's seconds by size. Ranks without a group keep step with the others."""
    began, samples = time.perf_counter(), dict[int, list[float]]()
    for size in spread(sizes):
        if len(samples) >= 3 and backend.longest(time.perf_counter() - began) > curve_s:
            break
        call = backend.operation(collective, group, ranks, size) if group is not None else lambda: None
        backend.barrier()
        first = backend.longest(_timed(call, 2))
        times = max(1, min(MOST, int(SAMPLE_S / max(first, 1e-7))))
        found = []
        for _ in range(REPEATS):
            backend.barrier()
            found.append(backend.longest(_timed(call, times)))
        samples[size] = found
    return samples


def _timed(call: Callable[[], None], times: int) -> float:
    """Return the seconds of one call, the mean of ``times``."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Exit code: 0 measured, 2 not possible."""
    parser = argparse.ArgumentParser(prog="resilio_hpc.autoparallel.measure.comm_bench")
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--largest", required=True, type=int)
    parser.add_argument("--curve-s", required=True, type=float)
    options = parser.parse_args(argv)
    backend = open_backend(options.backend)
    if backend.size < 2:
        raise UsageError("one rank alone has no peer: at least two are needed")

    def tell(text: str) -> None:
        if backend.rank == 0:
            print(text, flush=True)

    hosts = backend.hosts()
    curves = measure(backend, options.largest, options.curve_s, tell)
    if backend.rank == 0:
        about = profile_file.about(options.backend, backend.version, backend.device, hosts, os.environ)
        profile_file.write_communication(options.out, curves, about)
    backend.barrier()
    backend.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ResilioError as error:
        print(f"resilio: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
