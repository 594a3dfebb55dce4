"""What drills do to a cluster and to the run on it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from resilio_hpc.core import process_title
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.ledger import Event
from resilio_hpc.devtools.devcluster import DevCluster, RackMachines
from resilio_hpc.drills.kind import HELPERS, LOCAL, Act
from resilio_hpc.drills.throttle import ProbeThrottle
from resilio_hpc.launch.rundir import user_orders
from resilio_hpc.launch.rundir.user_orders import UserOrder

CPU_GROUPS = Path("/sys/fs/cgroup/cpu")


def roles_of(members: Sequence[str], leader: str, batch_host: str) -> dict[str, tuple[str, ...]]:
    """Which nodes each role of ``Act.to`` means. Pure; raises ResilioError for a run of one node."""
    if len(members) < 2:
        raise ResilioError(f"the run has {len(members)} node(s): a drill needs two")
    others = sorted((node for node in members if node != leader), key=lambda node: node == batch_host)
    half = len(members) // 2
    apart = tuple(sorted(others, key=lambda node: node != batch_host)[-half:])
    return {
        "": (),
        "leader": (leader,),
        "batch_host": (batch_host,),
        "follower": (others[0],),
        "follower2": (others[1] if len(others) > 1 else others[0],),
        "apart": apart,
        "with_leader": tuple(node for node in members if node not in apart),
    }


def last(events: Sequence[Event], kind: str) -> Event:
    """Return the newest event of a kind. Raises ResilioError."""
    found = next((event for event in reversed(events) if event.kind == kind), None)
    if found is None:
        raise ResilioError(f"the ledger has no {kind} event")
    return found


class Actor:
    """Carries out acts against one job on one cluster; roles are settled once, before the first act."""

    def __init__(self, cluster: DevCluster[RackMachines], job: int, joiner: str, run: Path) -> None:
        self.roles: Mapping[str, tuple[str, ...]] = {}
        self.draw: Callable[[Sequence[int]], int] = min  # which rank of a node is struck
        self.hits = 0  # processes that got a signal
        self.struck = -1  # the rank that got a signal last
        self.slowed = ""  # the node that was made slow
        self._throttle: ProbeThrottle | None = None
        self._run = run
        self.groups: list[Path] = []  # control groups to remove
        self._filled: list[str] = []  # nodes with a full disk
        self._cluster = cluster
        self._job = job
        self._joiner = joiner  # the script of a job that joins the run
        self._acts: dict[str, Callable[[tuple[str, ...], Sequence[Event]], None]] = {
            "kill_rank": self._kill_rank,
            "abort_rank": self._abort_rank,
            "stop_rank": self._stop_rank,
            "throttle_rank": self._throttle_rank,
            "slow_link": self._slow_link,
            "slow_loader": self._slow_loader,
            "kill_agent": self._kill_agent,
            "kill_srun": self._kill_srun,
            **{f"stop_{role}": partial(self._stop_helper, role) for role in HELPERS},
            "power_off": lambda nodes, _: self._each(cluster.machines.crash, nodes),
            "boot": lambda nodes, _: self._each(cluster.machines.boot, nodes),
            "partition": lambda nodes, _: self._each(cluster.machines.partition, nodes),
            "lose_packets": lambda nodes, _: self._each(cluster.machines.partition, nodes),
            "gpu_bad": self._gpu_bad,
            "fill_local": self._fill_local,
            "heal": lambda nodes, _: self._each(cluster.machines.heal, nodes),
            "split": lambda nodes, _: cluster.machines.split(*nodes),
            "hang_shared": lambda nodes, _: cluster.machines.hang_shared(*nodes),
            "release_shared": lambda nodes, _: cluster.machines.release_shared(*nodes),
            "kill_slurmd": lambda nodes, _: self._each(cluster.machines.kill_slurmd, nodes),
            "start_slurmd": lambda nodes, _: self._each(cluster.machines.start_slurmd, nodes),
            "slow_node": self._slow_node,
            "end_slow": lambda *_: self.end(),
            "test_nodes": self._test_nodes,
            "save_job": lambda *_: cluster.wait_until_saved(job),
            "kill_slurmctld": lambda *_: cluster.machines.kill_slurmctld(),
            "start_slurmctld": lambda *_: cluster.machines.start_slurmctld(),
            "set_down": self._set_down,
            "requeue": lambda *_: self._slurm("scontrol", "requeue", str(job)),
            "scancel": lambda *_: self._slurm("scancel", str(job)),
            "scancel_kill": lambda *_: self._slurm("scancel", "--signal=KILL", str(job)),
            "submit_urgent": lambda *_: self._submit_urgent(),
            "submit_joiner": lambda *_: self._submit_joiner(),
        }

    def end(self) -> None:
        """Let a slow node run again."""
        if self._throttle is not None:
            self._throttle.end()

    def settle_roles(self, events: Sequence[Event], batch_host: str) -> None:
        """Decide whom the roles mean, from the newest round."""
        members = [str(node) for node in last(events, "round").fields["members"]]
        self.roles = roles_of(members, str(last(events, "controller").fields["node"]), batch_host)

    def do(self, act: Act, events: Sequence[Event]) -> None:
        """Carry out one act."""
        self._acts[act.do](self.roles[act.to], events)

    def _slow_node(self, nodes: tuple[str, ...], _: Sequence[Event]) -> None:
        (self.slowed,) = nodes
        self._throttle = ProbeThrottle(self._cluster, self.slowed)

    def _test_nodes(self, *_: object) -> None:
        user_orders.write(self._run, UserOrder("test", "drill", "drill", replace=True))

    @staticmethod
    def _each(do: Callable[[str], None], nodes: Sequence[str]) -> None:
        for node in nodes:
            do(node)

    def _kill_rank(self, nodes: tuple[str, ...], events: Sequence[Event]) -> None:
        self._signal_rank(nodes[0], events, signal.SIGKILL)

    def _abort_rank(self, nodes: tuple[str, ...], events: Sequence[Event]) -> None:
        self._signal_rank(nodes[0], events, signal.SIGABRT)

    def _stop_rank(self, nodes: tuple[str, ...], events: Sequence[Event]) -> None:
        self._signal_rank(nodes[0], events, signal.SIGSTOP)

    def _signal_rank(self, node: str, events: Sequence[Event], number: int) -> None:
        pid = self._strike(node, events)
        self._kill(node, lambda process_pid, argv: process_pid == pid, number)

    def _strike(self, node: str, events: Sequence[Event]) -> int:
        """Choose the first rank of a node, and return its process, as the node numbers it."""
        ranks = last([e for e in events if e.kind == "ranks" and e.fields["node"] == node], "ranks")
        pids = {int(rank): int(pid) for rank, pid in ranks.fields["pids"].items()}
        self.struck = self.draw(sorted(pids))
        return pids[self.struck]

    def _throttle_rank(self, nodes: tuple[str, ...], events: Sequence[Event]) -> None:
        """Give one rank a fiftieth of a processor: more would not show beside the load of a test machine."""
        pid = self._strike(nodes[0], events)
        group = CPU_GROUPS / f"resilio-drill-{os.getpid()}-{self._job}"
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_quota_us").write_text("2000")
        (process,) = [process for process in self._cluster.machines.pids(nodes[0]) if process.pid == pid]
        (group / "cgroup.procs").write_text(str(process.host_pid))
        self.groups.append(group)

    def _slow_link(self, nodes: tuple[str, ...], events: Sequence[Event]) -> None:
        """Let all that a node sends pass a narrow bucket."""
        self._strike(nodes[0], events)
        bucket = ["tbf", "rate", "60mbit", "burst", "32kb", "latency", "100ms"]
        self._cluster.run(nodes[0], ["tc", "qdisc", "replace", "dev", "eth0", "root", *bucket])

    def _slow_loader(self, nodes: tuple[str, ...], events: Sequence[Event]) -> None:
        """Make each item that the data loaders of a node load take longer."""
        self._strike(nodes[0], events)
        (self._cluster.layout.nvme(nodes[0]) / "loader.slow").touch()

    def _gpu_bad(self, nodes: tuple[str, ...], _: Sequence[Event]) -> None:
        """Let root's health checks of a node say that its second GPU is bad. The GPUs of a dev cluster are fake."""
        self._cluster.run(nodes[0], [sys.executable, "-m", "resilio_hpc.drills.script.bad_gpu", "1"])

    def _fill_local(self, nodes: tuple[str, ...], _: Sequence[Event]) -> None:
        """Let the directory for local checkpoints be one in which no byte is left."""
        self._filled.append(nodes[0])
        self._cluster.run(nodes[0], ["mount", "-t", "tmpfs", "-o", "size=4k", "full", LOCAL])
        self._cluster.run(nodes[0], ["dd", "if=/dev/zero", f"of={LOCAL}/full", "bs=4k", "count=2"], check=False)

    def _kill_agent(self, nodes: tuple[str, ...], _: Sequence[Event]) -> None:
        self._kill(nodes[0], lambda _, argv: process_title.is_agent(argv))

    def _stop_helper(self, role: str, nodes: tuple[str, ...], _: Sequence[Event]) -> None:
        """Stop a process of the agent, or the agent itself. Raises ResilioError where there is none."""
        found = [
            process.host_pid for process in self._cluster.machines.pids(nodes[0])
            if process_title.helper_in("\0".join(process.argv).encode()) == role
        ]  # fmt: skip
        if not found:
            raise ResilioError(f"no {role} runs on {nodes[0]}")
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
            self.hits += 1

    def _kill_srun(self, nodes: tuple[str, ...], _: Sequence[Event]) -> None:
        batch_host = self.roles["batch_host"][0]
        wanted = {f"--nodelist={node}" for node in nodes}
        pids = [p.pid for p in self._cluster.machines.pids(batch_host) if p.program == "srun" and wanted <= set(p.argv)]
        self._kill(batch_host, lambda pid, _: pid == min(pids))  # it has a child, which ends its step

    def _kill(self, node: str, chosen: Callable[[int, tuple[str, ...]], bool], number: int = signal.SIGKILL) -> None:
        for process in self._cluster.machines.pids(node):
            if process.argv and chosen(process.pid, process.argv):
                try:
                    os.kill(process.host_pid, number)
                    self.hits += 1
                except ProcessLookupError:
                    pass  # an earlier act was quicker

    def _set_down(self, nodes: tuple[str, ...], _: Sequence[Event]) -> None:
        self._slurm("scontrol", "update", f"NodeName={nodes[0]}", "State=DOWN", "Reason=drill")

    def _submit_urgent(self) -> None:
        count = len(self._cluster.nodes)
        options = ["--partition=urgent", "--exclusive", f"--nodes={count}", "--job-name=urgent", "--output=/dev/null"]
        self._cluster.submit("#!/bin/bash\nsleep 3\n", options)

    def _submit_joiner(self) -> None:
        self._cluster.submit(self._joiner)

    def clean(self) -> None:
        """Remove what outlives the cluster."""
        for node in self._filled:
            with contextlib.suppress(ResilioError):  # it may have lost power meanwhile
                self._cluster.run(node, ["umount", "--lazy", LOCAL])
        for group in self.groups:
            with contextlib.suppress(OSError):
                group.rmdir()

    def _slurm(self, *argv: str) -> None:
        self._cluster.run("ctl", argv)
