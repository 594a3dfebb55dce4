"""How long it takes to read all nodes of a large cluster, from text to model, for each recorded version of Slurm.

    python benchmarks/slurm_parse.py [--nodes 10000] [--times 7] [--json FILE]

The recorded answers of tests/slurm/samples are multiplied: each node gets a name, a weight and a reason of its own. The
time is that of our parser alone, beside that of json.loads, which only makes dictionaries. CPU time tells on a machine
that others use, too.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from measure import machine
from resilio_hpc.devtools.devcluster.spec import SLURM_SERIES
from resilio_hpc.slurm.client import node_json, text_output

SAMPLES = Path(__file__).resolve().parent.parent / "tests" / "slurm" / "samples"
SERIES = tuple(SLURM_SERIES)
MARK = "@0f3a;"


@dataclass(frozen=True)
class Reading:
    """Median seconds; those of json.loads are 0 where there is no JSON."""

    what: str
    megabytes: float
    wall_s: float
    worst_wall_s: float
    cpu_s: float
    loads_cpu_s: float


def many_json(series: str, count: int) -> str:
    """Return the recorded answer with ``count`` nodes, laid out as Slurm does."""
    answer = json.loads((SAMPLES / f"nodes_{series}.json").read_text())
    few = answer["nodes"]
    answer["nodes"] = [
        {**few[number % len(few)], "name": f"node{number:05d}", "weight": number, "reason": f"reason {number}"}
        for number in range(count)
    ]
    return json.dumps(answer, indent=2)


def many_rows(count: int) -> str:
    """Return a table of as many nodes, each in two partitions."""
    (first, *_) = node_json.parse_nodes((SAMPLES / "nodes_26.05.json").read_text())
    assert first.gres[0].count == 4
    fixed = {"StateComplete": "idle+drain", "CPUs": "8", "CPUsState": "0/8/0/8", "Memory": "32000", "AllocMem": "0"}
    fixed |= {"Gres": "gpu:h100:4", "GresUsed": "gpu:h100:0(IDX:N/A)", "Features": "fast,rackA", "Weight": "10"}
    rows = []
    for number in range(count):
        own = {**fixed, "NodeHost": f"node{number:05d}", "Reason": f"reason {number}", "Timestamp": "1795199232"}
        for partition in ("main", "low"):
            row = {**own, "PartitionName": partition}
            rows.append("".join(row.get(column, "(null)") + MARK for column in text_output.NODE_COLUMNS))
    return "\n".join(rows) + "\n"


def timed(call: Callable[[], object], times: int) -> tuple[list[float], list[float]]:
    """Wall and CPU seconds of each call."""
    wall, cpu = [], []
    for _ in range(times):
        gc.collect()
        start = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return wall, cpu


def reading(what: str, text: str, parse: Callable[[str], object], loads: bool, times: int) -> Reading:
    wall, cpu = timed(lambda: parse(text), times)
    loads_s = statistics.median(timed(lambda: json.loads(text), times)[1]) if loads else 0.0
    median = statistics.median
    return Reading(what, len(text) / 1e6, median(wall), max(wall), median(cpu), loads_s)


def readings(count: int, times: int) -> list[Reading]:
    found = []
    for series in SERIES:
        text = many_json(series, count)
        assert len(node_json.parse_nodes(text)) == count
        found.append(reading(f"JSON of {series}", text, node_json.parse_nodes, True, times))
    rows = many_rows(count)
    assert len(text_output.parse_nodes(rows, MARK)) == count
    found.append(reading("table (sinfo -O)", rows, lambda text: text_output.parse_nodes(text, MARK), False, times))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = readings(options.nodes, options.times)
    table = Table(title=f"Reading {options.nodes} nodes, median of {options.times}")
    for heading in ("Answer", "Size", "Ours: wall", "worst", "CPU", "json.loads alone: CPU"):
        table.add_column(heading)
    for one in found:
        loads = f"{one.loads_cpu_s:.2f} s" if one.loads_cpu_s else ""
        wall, worst, cpu = (f"{value:.2f} s" for value in (one.wall_s, one.worst_wall_s, one.cpu_s))
        table.add_row(one.what, f"{one.megabytes:.1f} MB", wall, worst, cpu, loads)
    Console(width=100).print(table)
    if options.json:
        told = {"machine": machine(), "nodes": options.nodes, "readings": [asdict(one) for one in found]}
        options.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
