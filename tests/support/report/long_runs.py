"""Run directories of long runs: as many nodes, days and faults as asked, with the lines that a real run writes.

The controller's file has a line for each event of the run. With ``node_lines``, it also has one for each node of each
round, and each node's own file has the four lines that an agent writes in a round.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGAN = 1_760_000_000.0
STEP_S = 2.0
SAVE_EVERY = 300  # steps
BLOCKED_S = 1.5


@dataclass
class LongRun:
    """What is drawn of a run: sizes, and a seed. ``job_hours``: each job's time limit."""

    nodes: int
    days: float = 30.0
    faults: int = 1_000
    seed: int = 1
    job_hours: float = 48.0
    lines: dict[str, list[str]] = field(default_factory=dict)
    useful_s: float = 0.0  # in which steps were made that lasted
    rounds: list[tuple[float, int, str, list[str]]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [f"node{number:04d}" for number in range(self.nodes)]


def write_run(path: Path, run: LongRun, node_lines: bool = False) -> Path:
    """Write the run directory; return it."""
    draw(run)
    (path / "ledger").mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"version": 1, "run_id": "10c9f0e2a1b3", "created": BEGAN - 5.0}))
    for writer, lines in run.lines.items():
        if node_lines and writer.endswith(run.names[0]):
            for at, number, job, members in run.rounds:
                if writer == f"{job}-{run.names[0]}":
                    lines += [_started(at, number, node, writer) for node in members]
        with open(path / "ledger" / f"{writer}.jsonl", "w") as file:
            file.writelines(sorted(lines, key=_time_of))
    if node_lines:
        for index, node in enumerate(run.names):
            _write_agent(path / "ledger", run, node, index)
    return path


def draw(run: LongRun) -> None:
    """Draw the run's lines."""
    random_ = random.Random(run.seed)
    end = BEGAN + run.days * 86_400
    spares = max(1, run.nodes // 50) if run.nodes > 1 else 0
    times = sorted(random_.uniform(BEGAN + 600, end - 600) for _ in range(run.faults))
    at, step, number, job = BEGAN, 0, 0, 0
    while at < end:
        at, step, number, times = _Job(run, random_, job, spares).go(at, step, number, times, end)
        job += 1
        at += random_.uniform(300, 5_400)


class _Job:
    def __init__(self, run: LongRun, random_: random.Random, link: int, spares: int) -> None:
        self.run, self.random, self.link = run, random_, link
        self.name = str(4700 + link)
        self.supervisor, self.controller = f"{self.name}-supervisor-main", f"{self.name}-{run.names[0]}"
        self.members, self.spares = run.names[: run.nodes - spares], run.names[run.nodes - spares :]

    def say(self, writer: str, at: float, kind: str, /, **fields: Any) -> None:
        line = {"v": 1, "time": round(at, 6), "writer": writer, "event": kind, **fields}
        self.run.lines.setdefault(writer, []).append(json.dumps(line, separators=(",", ":")) + "\n")

    def tell(self, at: float, kind: str, /, **fields: Any) -> None:
        self.say(self.controller, at, kind, **fields)

    def go(
        self, at: float, step: int, number: int, times: list[float], end: float
    ) -> tuple[float, int, int, list[float]]:
        self.tell(at + 3, "controller", node=self.run.names[0], epoch=1)
        limit = min(at + self.run.job_hours * 3600, end)
        self.say(self.supervisor, at, "launch", job=self.name, mode="batch", nodes=self.run.names, link=self.link + 1,
                 end_time=limit + 300, argv=["resilio-launch", "--chain", "train.py"], slurm="26.05.0")  # fmt: skip
        self.say(self.supervisor, at + 1, "successor", job=str(4701 + self.link), link=self.link + 2)
        at, durable = at + 5.0, step
        at = self.begin(at, number, durable, step, self.random.uniform(20, 60))
        while True:
            fault = next((one for one in times if one > at), None)
            until = min(limit, fault if fault is not None else limit)
            at, step, durable = self.train(at, until, step, durable)
            if fault is None or until >= limit:
                break
            times = [one for one in times if one > at]
            at, step = self.fail(at, number, step, durable)
            number += 1
        self.tell(at, "stop_agreed", step=step)
        self.tell(at + 2, "committed", step=step, seconds=0.4, epoch=1, blocked_s=BLOCKED_S)
        verdict = "time_limit" if limit < end else "completed"
        self.tell(at + 3, "verdict", verdict=verdict, reason="the job's time limit is near", round=number,
                  restarts=0, committed=step, epoch=1, trained=True)  # fmt: skip
        self.say(self.supervisor, at + 8, "launch_ends", verdict=verdict, exit_code=0)
        return at + 8, step, number + 1, times

    def begin(self, at: float, number: int, restored: int, step: int, took: float) -> float:
        self.run.rounds.append((at, number, self.name, list(self.members)))
        self.tell(at, "round", round=number, members=self.members, world_size=8 * len(self.members))
        self.tell(at + 0.5, "start", round=number, restore=f"committed:{restored}" if restored else "")
        source = "memory" if number % 3 else "committed"
        self.tell(at + took, "first_step", round=number, step=restored + 1, restored=restored or -1,
                  source=source if restored else "", sources={source: 8 * len(self.members)},
                  restore_s=min(took / 3, 4.0))  # fmt: skip
        return at + took

    def train(self, at: float, until: float, step: int, durable: int) -> tuple[float, int, int]:
        began = at
        while at + SAVE_EVERY * STEP_S < until:
            at, step = at + SAVE_EVERY * STEP_S, step + SAVE_EVERY
            self.tell(at + 3, "committed", step=step, seconds=0.3, epoch=1,
                      blocked_s=BLOCKED_S * self.random.uniform(0.5, 2.0))  # fmt: skip
            durable = step
        self.run.useful_s += until - began
        return until, step + int((until - at) / STEP_S), durable

    def fail(self, at: float, number: int, step: int, durable: int) -> tuple[float, int]:
        kind = self.random.choices(("signal", "exit", "node", "hang"), (55, 15, 20, 10))[0]
        node = self.random.choice(self.members[1:] or self.members)
        rank = 8 * self.members.index(node) + self.random.randrange(8)
        lost = step - durable if kind != "signal" or self.random.random() < 0.1 else 0
        self.run.useful_s -= lost * STEP_S
        rung, seen = "restart_ranks", at + 0.05
        if kind == "node" and len(self.members) > 1:
            seen = at + 5.0
            self.tell(seen, "node_lost", node=node, silent_s=5.0)
            rung = self.replace(node)
        else:
            kind = "signal" if kind == "node" else kind
            if kind == "hang":
                at += 620
                seen = at + 0.05
                self.tell(at - 600, "stalled", round=number, step=step, silent_s=20.0, limit_s=20.0, nodes=[node])
            self.failed(at, number, node, rank, kind, "killed by SIGKILL" if kind == "signal" else "RuntimeError: NaN")
        for echo in range(min(8, 8 * len(self.members) - 1)):
            self.failed(seen + 0.1, number, self.members[-1], echo, "exit", "Connection reset by peer " * 4, echo=True)
        self.tell(seen, "decision", rung=rung, reason="the nodes are fine", round=number, without_progress=1,
                  acted=True)  # fmt: skip
        self.tell(seen + 0.6, "origin", round=number, node=node, rank=-1 if kind == "node" else rank, primary=True,
                  confidence=0.95, evidence=f"{node}: the first end; others waited for it", ends=9)  # fmt: skip
        self.tell(seen + 0.6, "echoes", round=number, node=node, rank=rank, count=8, logs="/shared/logs")
        again = self.begin(seen + 1, number + 1, step - lost, step, self.random.uniform(1, 90))
        self.tell(again, "recovered", kind={"signal": "rank_killed", "exit": "rank_exception", "node": "node_lost"}.get(
            kind, kind), node=node, rank=rank, round=number + 1, detection_s=seen - at, recovery_s=again - at,
            at=again, restored=step - lost, lost_steps=lost, plan=rung)  # fmt: skip
        return again, step - lost + 1

    def failed(self, at: float, number: int, node: str, rank: int, kind: str, message: str, echo: bool = False) -> None:
        self.tell(at, "rank_failed", round=number, node=node, rank=rank, local_rank=rank % 8, kind=kind,
                  exit_code=1 if kind == "exit" else None, signal=9 if kind == "signal" else None, message=message,
                  traceback="", place="train.py:88" if kind == "exit" else "", echo=echo)  # fmt: skip

    def replace(self, node: str) -> str:
        if not self.spares:
            return "wait_for_node"
        self.members = sorted([*(one for one in self.members if one != node), self.spares.pop(0)])
        self.spares.append(node)  # it comes back
        return "replace_node"


def _time_of(line: str) -> float:
    return float(line[line.index('"time":') + 7 : line.index(',"writer"')])


def _started(at: float, number: int, node: str, writer: str) -> str:
    return (
        f'{{"v":1,"time":{at + 0.7:.6f},"writer":"{writer}","event":"ranks_started","node":"{node}",'
        f'"round":{number},"seconds":0.0247,"mode":"fork"}}\n'
    )


def _write_agent(ledger: Path, run: LongRun, node: str, index: int) -> None:
    for job in sorted({job for _, _, job, _ in run.rounds}):
        writer = f"{job}-{node}"
        lines = []
        for at, number, of, _ in run.rounds:
            if of == job:
                head = f'{{"v":1,"time":{at + 0.6:.6f},"writer":"{writer}","event":'
                tail = f'"node":"{node}","round":{number}'
                counts = '"values":{"tcp_retransmitted_segments_total":54816}'
                pids = ",".join(f'"{8 * index + local}":{20_000 + local}' for local in range(8))
                lines += [
                    f'{head}"ranks",{tail},"mode":"fork","pids":{{{pids}}},"kept":0}}\n',
                    f'{head}"counters",{tail},"when":"before",{counts}}}\n',
                    f'{head}"ranks_stopped","node":"{node}","seconds":0.042}}\n',
                    f'{head}"counters",{tail},"when":"after",{counts},"grown":{{}}}}\n',
                ]
        with open(ledger / f"{writer}.jsonl", "a") as file:
            file.writelines(lines)
