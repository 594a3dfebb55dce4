"""False alarms of the pair check, and what it finds: real probes of nodes that this machine plays, again and again.

    python benchmarks/pair_check.py --rounds 1000 --loaded
    python benchmarks/pair_check.py --rounds 0 --planted 10

First healthy checks, until there were so many rounds: how often was a node named, how often suspected.
``--loaded``: beside busy processes, twice as many as cores, one that writes and one that churns memory. Then planted
faults, one node at a time: killed in the middle (dead), killed work (crashed), stopped and continued by signals (slow).
A check takes another round only where a node is suspected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

import machine_load
from resilio_hpc.diagnose.coordinator import CheckCoordinator
from resilio_hpc.diagnose.policy import CheckRequest, PairPolicy, pair_policy
from resilio_hpc.diagnose.result import CheckResult
from resilio_hpc.diagnose.starters import LocalStarter

STOPPED_S, WORKING_S = 0.1, 0.03  # a slow node: it does the work of 1.3 s in 5.6


def policy_of(arguments: argparse.Namespace) -> PairPolicy:
    """Small sizes, since a machine plays all nodes; limits that a busy one does not reach; the shipped thresholds."""
    return msgspec.structs.replace(
        pair_policy(), cpu_matrix=arguments.matrix, cpu_message_bytes=arguments.message, block_s=arguments.block_s,
        start_s=600.0, budget_s=86400.0, silence_s=60.0,
    )  # fmt: skip


@contextlib.contextmanager
def coordinator(arguments: argparse.Namespace) -> Iterator[tuple[CheckCoordinator, LocalStarter]]:
    """Nodes whose probers are ready."""
    nodes = tuple(f"n{number}" for number in range(1, arguments.nodes + 1))
    request = CheckRequest(nodes=nodes, place="local", policy=policy_of(arguments))
    starter = LocalStarter(request)
    each = CheckCoordinator(nodes, request.policy, starter, "127.0.0.1", lambda _: None)
    try:
        each.begin()
        yield each, starter
    finally:
        each.part()


@contextlib.contextmanager
def load_of(arguments: argparse.Namespace) -> Iterator[None]:
    """Others that want the machine, too."""
    if not arguments.loaded:
        yield
        return
    with tempfile.TemporaryDirectory() as directory, machine_load.loaded(Path(directory)):
        yield


def healthy(arguments: argparse.Namespace) -> dict[str, object]:
    """Healthy checks until there were ``--rounds`` rounds."""
    outcomes: Counter[str] = Counter()
    rounds = checks = named = suspected = 0
    began = time.monotonic()
    with load_of(arguments), coordinator(arguments) as (each, _):
        while rounds < arguments.rounds:
            result = each.examine()
            checks += 1
            rounds += result.rounds
            suspected += result.rounds > 1 + arguments.nodes % 2
            outcomes[result.outcome] += 1
            if result.bad or result.slow:
                named += len(result.bad + result.slow)
                print(msgspec.json.encode(result).decode(), file=sys.stderr, flush=True)
            if checks % 50 == 0:
                load = os.getloadavg()[0]
                print(
                    f"{rounds} rounds, {named} named, {suspected} suspected, load {load:.1f}",
                    file=sys.stderr,
                    flush=True,
                )
    return {
        "healthy": True, "nodes": arguments.nodes, "loaded": arguments.loaded, "rounds": rounds, "checks": checks,
        "nodes_named": named, "checks_with_suspects": suspected, "outcomes": dict(outcomes),
        "seconds": round(time.monotonic() - began), "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def children(pid: int) -> list[int]:
    """Return processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Throttle(threading.Thread):
    """Stops and continues the prober of a checker, until told to end."""

    def __init__(self, checker: int) -> None:
        super().__init__(daemon=True)
        self._checker = checker
        self.over = threading.Event()

    def run(self) -> None:
        """Until ``over``."""
        while not self.over.is_set():
            for number, wait_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, WORKING_S)):
                with contextlib.suppress(OSError):
                    for prober in children(self._checker):
                        for worker in children(prober):
                            os.kill(worker, number)
                time.sleep(wait_s)


def planted(fault: str, arguments: argparse.Namespace, draw: random.Random) -> tuple[str, CheckResult]:
    """One check with one faulty node: which, and what was found."""
    with load_of(arguments), coordinator(arguments) as (each, starter):
        victim = draw.randrange(arguments.nodes)
        pid = starter.checkers[victim].pid
        throttle = Throttle(pid)

        def strike() -> None:
            probers = children(pid)
            workers = [worker for prober in probers for worker in children(prober)]
            for process in [pid, *probers, *workers] if fault == "dead" else workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

        def crash_again_and_again() -> None:
            while not throttle.over.wait(0.05):
                with contextlib.suppress(OSError):
                    strike()

        if fault == "slow":
            throttle.start()
        elif fault == "dead":
            threading.Timer(draw.uniform(0.0, 0.3), strike).start()
        else:
            threading.Thread(target=crash_again_and_again, daemon=True).start()
        result = each.examine()
        throttle.over.set()
        if fault == "slow":
            throttle.join()
        return f"n{victim + 1}", result


def faults(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield what becomes of planted faults."""
    draw = random.Random(arguments.seed)
    for fault in arguments.faults.split(","):
        right = wrong = 0
        seconds = []
        for _ in range(arguments.planted):
            began = time.monotonic()
            victim, result = planted(fault, arguments, draw)
            seconds.append(time.monotonic() - began)
            named = result.slow if fault == "slow" else result.bad
            right += named == (victim,)
            wrong += len(set(result.bad + result.slow) - {victim})
            if named != (victim,):
                print(victim, msgspec.json.encode(result).decode(), file=sys.stderr, flush=True)
        yield {
            "planted": fault, "checks": arguments.planted, "named": right, "healthy_nodes_named": wrong,
            "nodes": arguments.nodes, "loaded": arguments.loaded, "seconds_each": round(sum(seconds) / len(seconds), 1),
        }  # fmt: skip


def main() -> None:
    """One line of JSON for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1000, help="healthy rounds")
    parser.add_argument("--planted", type=int, default=0, help="checks for each kind of fault")
    parser.add_argument("--faults", default="slow,dead,crashed")
    parser.add_argument("--loaded", action="store_true", help="load the machine on purpose (machine_load.py)")
    parser.add_argument("--matrix", type=int, default=256)
    parser.add_argument("--message", type=int, default=262144, help="bytes")
    parser.add_argument("--block-s", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.rounds:
        print(json.dumps(healthy(arguments)), flush=True)
    if arguments.planted:
        for line in faults(arguments):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
