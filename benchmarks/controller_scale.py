#!/usr/bin/env python3
"""One controller, thousands of agents: how soon a round forms, what heartbeats cost, how soon another takes over.

    python benchmarks/controller_scale.py                          # 1,000 and 4,000 agents, three times each
    python benchmarks/controller_scale.py --agents 1000 --repeats 1

Agents are the real ``AgentCore`` on real authenticated sockets, without ranks; all of them share this machine with the
controller. The bare limit, measured in turn with ours: as many CURVE handshakes and three small exchanges each, with no
protocol at all. The times to compare are therefore ratios; CPU seconds tell how far the machine was busy with others.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilio_hpc.launch.agent.decisions.heartbeat import beat_interval_s

HERE = Path(__file__).parent
STEADY_S = 8.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MAX_PER_PROCESS = 1000  # agents: each has several descriptors, and a process 20,000


class Role:
    """A process of ``scale_roles.py``, and what it tells."""

    verbose = False

    def __init__(self, plan: dict[str, Any], said_to: int = subprocess.DEVNULL) -> None:
        self.name = f"{plan['role']} {plan.get('first', '')}"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "scale_roles.py"), json.dumps(plan)], stdin=said_to, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}"},
        )  # fmt: skip
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if Role.verbose:
                print(f"{time.monotonic():.3f} {self.name}: {line.decode()}", end="", file=sys.stderr)
            self._events.put(json.loads(line))
        self._events.put(None)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], limit_s: float) -> dict[str, Any]:
        """Return the next event that is wanted."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SystemExit(f"{self.name}: nothing like that came within {limit_s:.0f} s") from None
            if event is None:
                raise SystemExit(f"{self.name} has ended")
            if event["event"] in ("undecodable", "abandoned", "unwanted claim"):
                raise SystemExit(f"{self.name}: {event}")
            if wanted(event):
                return event

    def say(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    @property
    def cpu_s(self) -> float:
        """User and system time so far, of all its threads."""
        fields = (Path("/proc") / str(self._process.pid) / "stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    @property
    def peak_mb(self) -> float:
        """The most memory that it ever had."""
        text = (Path("/proc") / str(self._process.pid) / "status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1024

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
        self._process.wait()


class Crowd:
    """All agents but two, in processes that have room for their sockets."""

    def __init__(self, plan: dict[str, Any], first: int, agents: int) -> None:
        shares = range(first, agents, MAX_PER_PROCESS)
        self._roles = [
            Role(plan | {"first": share, "count": min(MAX_PER_PROCESS, agents - share)}, said_to=subprocess.PIPE)
            for share in shares
        ]

    def begin(self) -> float:
        """All at once; when that was."""
        for role in self._roles:
            role.wait_for(lambda event: event["event"] == "ready", 60)
        began = time.monotonic()
        for role in self._roles:
            role.say("go")
        return began

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], limit_s: float) -> float:
        """When the last of them told it."""
        return max(float(role.wait_for(wanted, limit_s)["at"]) for role in self._roles)

    @property
    def cpu_s(self) -> float:
        """Of all of them."""
        return sum(role.cpu_s for role in self._roles)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        for role in self._roles:
            role.end(number)


def measure_bare(agents: int, limit_s: float) -> dict[str, float]:
    """Handshakes and small exchanges alone."""
    with tempfile.TemporaryDirectory(prefix="resilio-scale-") as folder:
        common = {"run": f"{folder}/run", "agents": agents}
        server = Role({"role": "bare-server", **common})
        crowd = None
        try:
            port = server.wait_for(lambda event: event["event"] == "bare", 60)["port"]
            crowd = Crowd({"role": "bare-crowd", **common, "port": port}, 0, agents)
            before, began = server.cpu_s, crowd.begin()
            ended = crowd.wait_for(lambda event: event["event"] == "every answer", limit_s)
            return {
                "bare_s": ended - began, "bare_server_cpu_s": server.cpu_s - before, "bare_crowd_cpu_s": crowd.cpu_s,
            }  # fmt: skip
        finally:
            for role in (server, crowd):
                if role is not None:
                    role.end()


def measure_ours(agents: int, timeout_s: float, limit_s: float, profile: Path | None) -> dict[str, float]:
    """Play a round, then heartbeats for a while, then kill the controller's node."""
    with tempfile.TemporaryDirectory(prefix="resilio-scale-") as folder:
        common = {"run": f"{folder}/run", "agents": agents, "timeout_s": timeout_s, "profile": str(profile or "")}
        roles: list[Role | Crowd] = []
        try:
            leader = Role({"role": "node", "first": 0, **common})
            roles.append(leader)
            leader.wait_for(lambda event: event["event"] == "controller", 60)
            successor = Role({"role": "node", "first": 1, **common})
            roles.append(successor)
            successor.wait_for(lambda event: event["event"] == "every welcome", 60)
            crowd = Crowd({"role": "crowd", **common}, 2, agents)
            roles.append(crowd)
            figures = _form(leader, crowd, limit_s) | _steady(leader, agents, timeout_s)
            return figures | _takeover(leader, crowd, limit_s, signal.SIGINT if profile else signal.SIGKILL)
        finally:
            for role in reversed(roles):
                role.end(signal.SIGINT if profile else signal.SIGKILL)  # a profile is then written


def _form(leader: Role, crowd: Crowd, limit_s: float) -> dict[str, float]:
    """Until every agent was told to start its ranks; and until the controller knows that all of them run."""
    before, began = leader.cpu_s, crowd.begin()
    formed = crowd.wait_for(lambda event: event["event"] == "every start", limit_s)
    figures = {"formed_s": formed - began, "formed_cpu_s": leader.cpu_s - before, "formed_crowd_cpu_s": crowd.cpu_s}
    running = leader.wait_for(lambda event: event["event"] == "phase" and event["phase"] == "running", limit_s)
    return figures | {"running_s": running["at"] - began}


def _steady(leader: Role, agents: int, timeout_s: float) -> dict[str, float]:
    time.sleep(2.0)
    before, began = leader.cpu_s, time.monotonic()
    time.sleep(STEADY_S)
    core = (leader.cpu_s - before) / (time.monotonic() - began)
    beats = agents / beat_interval_s(timeout_s, agents)
    return {"beats_per_s": beats, "core": core, "core_per_1000_beats": core / beats * 1000, "peak_mb": leader.peak_mb}


def _takeover(leader: Role, crowd: Crowd, limit_s: float, number: signal.Signals) -> dict[str, float]:
    """Until every agent follows the new controller, and until every one was told to start its ranks again."""
    killed = time.monotonic()
    leader.end(number)
    welcomed = crowd.wait_for(lambda event: event["event"] == "every welcome" and event["epoch"] > 1, limit_s)
    started = crowd.wait_for(lambda event: event["event"] == "every start" and event["epoch"] > 1, limit_s)
    return {"takeover_s": welcomed - killed, "restarted_s": started - killed}


def table(agents: int, trials: list[dict[str, float]]) -> str:
    """Medians and the whole spread, ours beside the bare limit."""
    lines = [f"{agents} agents, {len(trials)} trials: median (least … most)"]
    for name in dict.fromkeys(name for trial in trials for name in trial):
        values = [trial[name] for trial in trials if name in trial]
        lines.append(f"  {name:22} {statistics.median(values):9.3f}   ({min(values):.3f} … {max(values):.3f})")
    ratios = [trial["formed_s"] / trial["bare_s"] for trial in trials if "formed_s" in trial and "bare_s" in trial]
    if ratios:
        lines.append(
            f"  {'formed : bare':22} {statistics.median(ratios):9.3f}   ({min(ratios):.3f} … {max(ratios):.3f})"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="--heartbeat-timeout of the run")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="how long anything may take")
    parser.add_argument("--profile", type=Path, help="write FILE.ROLE-FIRST: a cProfile of each process")
    parser.add_argument("--only", choices=("bare", "ours"))
    parser.add_argument("--verbose", action="store_true", help="everything that the processes tell")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    Role.verbose = options.verbose
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results: dict[int, list[dict[str, float]]] = {}
    for agents in options.agents:
        for trial in range(options.repeats):
            load = os.getloadavg()[0]
            figures: dict[str, float] = {"load": load}
            if options.only != "ours":
                figures |= measure_bare(agents, options.limit)
            if options.only != "bare":
                figures |= measure_ours(agents, options.timeout, options.limit, options.profile)
            results.setdefault(agents, []).append(figures)
            print(f"{agents} agents, trial {trial + 1}:", *(f"{k} {v:.3f}" for k, v in figures.items()), flush=True)
    for agents, trials in results.items():
        print(table(agents, trials))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
