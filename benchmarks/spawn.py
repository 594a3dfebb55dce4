"""Starting ranks: forked from a zygote beside executed anew, from the order to start to the first step of all.

    python benchmarks/spawn.py [--quick] [--memory] [--json FILE]

Every rank imports torch, joins a gloo group through the round's store and takes one AdamW step under
DistributedDataParallel. ``--memory`` measures instead whether transparent huge pages speed up fresh CPU tensors.
"""

import argparse
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from measure import Series, print_table, write_json
from resilio_hpc.launch.workers.spawner import AllStopped, RankCommand, Ready, Spawner, SpawnerDied, StoreReady

TIMEOUT_S = 120.0
STEP = """
import json, time
stamps = {"first line": time.time()}
import torch, torch.distributed as dist
stamps["import"] = time.time()
dist.init_process_group("gloo")
stamps["group"] = time.time()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()))
optimizer = torch.optim.AdamW(model.parameters())
stamps["build"] = time.time()
model(torch.ones(8, 256)).sum().backward()
optimizer.step()
stamps["step"] = time.time()
print(json.dumps(stamps), flush=True)
time.sleep(1000)
"""
PHASES = ("first line", "import", "group", "build", "step")
FRESH = """
import json, sys, time
import torch
source = torch.ones(4 << 20)  # 16 MiB
while time.time() < float(sys.argv[1]): pass  # all ranks at once
begun = time.perf_counter()
copies = [source.clone() for _ in range(16)]
fresh = time.perf_counter()
for copy in copies: copy.copy_(source)
print(json.dumps({"fresh": fresh - begun, "again": time.perf_counter() - fresh}), flush=True)
time.sleep(1000)
"""
SETTINGS = {
    "defaults": {},
    "glibc.malloc.hugetlb=1": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "THP_MEM_ALLOC_ENABLE=1": {"THP_MEM_ALLOC_ENABLE": "1"},
}
Event = TypeVar("Event")


def wait(spawner: Spawner, kind: type[Event]) -> Event:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        select.select([spawner], [], [], 1.0)
        for event in spawner.events():
            if isinstance(event, kind):
                return event
            if isinstance(event, SpawnerDied):
                break
    raise SystemExit(f"the spawner never said {kind.__name__}")


@contextmanager
def running(use_zygote: bool, directory: Path, **environment: str) -> Iterator[Spawner]:
    package = str(Path(__file__).resolve().parents[1])
    spawner = Spawner(
        {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", **environment},
        use_zygote=use_zygote,
        directory=directory,
    )
    spawner.start()
    try:
        wait(spawner, Ready)
        yield spawner
    finally:
        spawner.kill()


def start_ranks(spawner: Spawner, directory: Path, ranks: int, port: int, arguments: Sequence[str] = ()) -> None:
    for rank in range(ranks):
        (directory / f"{rank}.out").unlink(missing_ok=True)
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        out, err = f"{directory}/{rank}.out", f"{directory}/{rank}.err"
        command = RankCommand(rank, ("script.py", *arguments), "script", env, str(directory), out, err)
        spawner.spawn(command)


def stamps_of(directory: Path, ranks: int) -> list[dict[str, float]]:
    """Return what each rank printed, once all have."""
    deadline = time.monotonic() + TIMEOUT_S
    paths = [directory / f"{rank}.out" for rank in range(ranks)]
    while not all(path.exists() and path.read_text().endswith("\n") for path in paths):
        if time.monotonic() > deadline:
            raise SystemExit(f"a rank never finished: {(directory / '0.err').read_text()}")
        time.sleep(0.005)
    return [json.loads(path.read_text()) for path in paths]


def one_round(spawner: Spawner, directory: Path, ranks: int, number: int, series: Series, stop: Series) -> None:
    """Start the ranks and stop them again. Phases are the last rank's: what the slowest is waited for."""
    spawner.open_store(number, "localhost")
    port = wait(spawner, StoreReady).port
    begun = time.time()
    start_ranks(spawner, directory, ranks, port)
    stamps = stamps_of(directory, ranks)
    reached = [begun, *(max(stamp[phase] for stamp in stamps) for phase in PHASES)]
    phases = {phase: reached[index + 1] - reached[index] for index, phase in enumerate(PHASES)}
    series.values_s.append(reached[-1] - begun)
    series.phases_s.append(phases)
    spawner.stop(signal.SIGKILL)
    stop.values_s.append(wait(spawner, AllStopped).seconds)


def measure_start(counts: Sequence[int], times: int) -> list[Series]:
    """Order to start → first step of all ranks; and the time that killing and reaping them takes."""
    results: list[Series] = []
    for name, use_zygote in (("forked", True), ("executed", False)):
        with tempfile.TemporaryDirectory() as folder, running(use_zygote, Path(folder)) as spawner:
            (Path(folder) / "script.py").write_text(STEP)
            for ranks in counts:
                series, stop = Series(name, f"{ranks} ranks"), Series(f"{name}, stop", f"{ranks} ranks")
                one_round(spawner, Path(folder), ranks, 0, Series("", ""), Series("", ""))  # warms the file cache
                for number in range(times if use_zygote else max(1, times // 3)):
                    one_round(spawner, Path(folder), ranks, number, series, stop)
                results += [series, stop]
    return results


def measure_spawner(times: int) -> list[Series]:
    """Start → ready for orders, with and without preloading."""
    results = [Series("zygote", "start to ready"), Series("no zygote", "start to ready")]
    with tempfile.TemporaryDirectory() as folder:
        for series, use_zygote in zip(results, (True, False), strict=True):
            for _ in range(times):
                begun = time.monotonic()
                with running(use_zygote, Path(folder)):
                    series.values_s.append(time.monotonic() - begun)
    return results


def measure_memory(ranks: int, times: int) -> list[Series]:
    """Slowest rank's time for 256 MiB of fresh 16 MiB tensors; phase: the same copies into memory that is there."""
    results = {name: Series(name, f"{ranks} ranks, 256 MiB each") for name in SETTINGS}
    for _ in range(times):
        for name, environment in SETTINGS.items():  # interleaved, because the machine changes as it is used
            with tempfile.TemporaryDirectory() as folder, running(True, Path(folder), **environment) as spawner:
                (Path(folder) / "script.py").write_text(FRESH)
                start_ranks(spawner, Path(folder), ranks, 0, (str(time.time() + 1.0),))
                stamps = stamps_of(Path(folder), ranks)
                results[name].values_s.append(max(stamp["fresh"] for stamp in stamps))
                results[name].phases_s.append({"copied again": max(stamp["again"] for stamp in stamps)})
    return list(results.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few ranks, few repetitions")
    parser.add_argument("--memory", action="store_true", help="transparent huge pages for fresh tensors instead")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    if arguments.memory:
        title = "Fresh CPU tensors"
        series = measure_memory(2 if arguments.quick else 4, 2 if arguments.quick else 9)
    else:
        title = "From the order to start to the first step of all ranks; stop: SIGKILL until all are reaped"
        series = measure_start((1, 4) if arguments.quick else (1, 4, 8), 3 if arguments.quick else 15)
        series += measure_spawner(1 if arguments.quick else 3)
    print_table(title, series)
    if arguments.json:
        write_json(arguments.json, title, series)


if __name__ == "__main__":
    main()
