"""pyslurm in a process that may die, hang or lie: the commands serve instead. With a real one where it is installed."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from resilio_hpc.core.process import Completed
from resilio_hpc.slurm.client import which_client
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.pyslurm_client import PyslurmClient
from resilio_hpc.slurm.client.pyslurm_reader import PyslurmLost, PyslurmReader
from resilio_hpc.slurm.client.text_output import parse_partitions
from tests.support.environments import ROOT
from tests.support.slurm.fake_slurmctld import FakeNode, FakeSlurmctld

PYSLURM = """
import time
class RPCError(Exception): pass
class Node:
    total_cpus = allocated_cpus = real_memory = allocated_memory = None
    weight = 1
    configured_gres = {}; available_features = active_features = None
    reason = reason_user = comment = extra = address = slurm_version = None
    reason_time = 0
    def __init__(self, name, state="IDLE"):
        self.name, self.state, self.partitions = name, state, ["main"]
    @staticmethod
    def load(name):
        BEHAVIOUR
        if name not in ("n1", "n2"): raise RPCError("Node '%s' does not exist" % name)
        return Node(name)
class Nodes:
    @staticmethod
    def load():
        BEHAVIOUR
        return {"n1": Node("n1"), "n2": Node("n2")}
class Partition:
    name, state, nodes, total_nodes, total_cpus, is_default = "main", "UP", "n[1-2]", 2, 24, True
    max_time, default_time, max_nodes, min_nodes = 1440, None, "UNLIMITED", 0
    priority_tier, preempt_mode, oversubscribe = 1, "OFF", "NO"
class Partitions:
    @staticmethod
    def load():
        return {"main": Partition()}
class Job:
    state, state_reason, user_name, user_id, account, qos = "PENDING", "Priority", "me", 7, None, None
    num_nodes, allocated_nodes, time_limit, submit_time, start_time, end_time = 2, None, "UNLIMITED", 1700, None, None
    requeue_count, name, comment, command = 0, "a | b", None, None
    partition, working_directory = "main", "/home/me"
    def __init__(self, id, array_id=None, dependencies=None):
        self.id, self.array_id, self.dependencies = id, array_id, dependencies
class Jobs:
    @staticmethod
    def load():
        return {job.id: job for job in (JOBS)}
"""
PARTITION = (
    "PartitionName=main Default=YES DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 Nodes=n[1-2] "
    "PriorityTier=1 OverSubscribe=NO PreemptMode=OFF State=UP TotalCPUs=24 TotalNodes=2\n"
)


class Answering(FakeSlurmctld):
    """The model, which also knows a partition and jobs; ``names`` are those of the jobs."""

    names: dict[int, str]

    def __call__(self, argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        words = list(argv)
        if words == ["scontrol", "-a", "-o", "show", "partitions"]:
            self.between(words)
            return Completed(tuple(words), 0, PARTITION, "")
        if words[:4] == ["scontrol", "-a", "show", "jobs"] and words[-1] == "--json":
            self.between(words)
            found = [self._job(number) for number in self.names if words[4:-1] in ([], [str(number)])]
            return Completed(tuple(words), 0, json.dumps({"jobs": found, "errors": []}), "")
        return super().__call__(argv, timeout_s, extra)

    def _job(self, number: int) -> dict[str, object]:
        return {
            "job_id": number, "job_state": ["RUNNING"], "user_name": "me", "user_id": 7, "partition": "main",
            "node_count": 2, "time_limit": {"set": False, "infinite": True, "number": 0}, "submit_time": 1700,
            "restart_cnt": 0, "name": self.names[number], "current_working_directory": "/home/me",
        }  # fmt: skip


def reader(tmp_path: Path, behaviour: str = "pass", jobs: str = "") -> PyslurmReader:
    """The real child with a module named pyslurm that is not pyslurm."""
    (tmp_path / "pyslurm.py").write_text(PYSLURM.replace("BEHAVIOUR", behaviour).replace("JOBS", jobs))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = ["env", f"PYTHONPATH={path}", sys.executable, "-m", "resilio_hpc.slurm.client.pyslurm_child"]
    return PyslurmReader(command)


def slurm(**names: str) -> Answering:
    model = Answering({"n1": FakeNode(), "n2": FakeNode()})
    model.names = {int(number.removeprefix("j")): name for number, name in names.items()}
    return model


def asked(model: FakeSlurmctld) -> list[str]:
    seen: list[str] = []
    model.between = lambda argv: seen.append(argv[0])
    return seen


def test_nodes_come_through_pyslurm_when_it_agrees_with_the_commands(tmp_path: Path) -> None:
    model = slurm()
    client = PyslurmClient(reader(tmp_path), model)
    assert client.agrees()
    seen = asked(model)
    assert [node.name for node in client.nodes()] == ["n1", "n2"]
    assert [str(node.state) for node in client.nodes(["n2"])] == ["IDLE"]
    assert seen == []
    assert client.nodes(["n9"]) == ()
    assert "scontrol" in seen  # what pyslurm does not know, the commands are asked for
    model.nodes["n3"] = FakeNode()
    assert not client.agrees()


def test_partitions_and_jobs_come_through_pyslurm_too(tmp_path: Path) -> None:
    model = slurm(j5="a | b", j6="a | b")
    client = PyslurmClient(reader(tmp_path, jobs="Job(5), Job(7)"), model)
    assert client.agrees()  # job 6 has gone since, job 7 has come: what both tell is the same
    seen = asked(model)
    assert client.partitions() == parse_partitions(PARTITION)
    (job,) = client.jobs(["5"])
    assert (job.id, job.name, job.time_limit_s, str(job.state)) == (5, "a | b", math.inf, "PENDING")
    assert [one.id for one in client.jobs()] == [5, 7]
    assert seen == []
    assert [one.id for one in client.jobs(["6"])] == [6]  # which pyslurm does not know
    assert seen[-1] == "scontrol"


@pytest.mark.parametrize("jobs", ["Job(5), Job(6, array_id=6)", "Job(5), Job(6, dependencies={'afterany': [5]})"])
def test_what_pyslurm_leaves_out_of_jobs_is_asked_of_the_commands(tmp_path: Path, jobs: str) -> None:
    model = slurm(j5="a | b", j6="an array")
    client = PyslurmClient(reader(tmp_path, jobs=jobs), model)
    assert client.agrees()
    seen = asked(model)
    assert [one.name for one in client.jobs()] == ["a | b", "an array"]
    assert [one.name for one in client.jobs(["6"])] == ["an array"]
    assert seen == ["scontrol", "scontrol"]
    assert [str(one.state) for one in client.jobs(["5"])] == ["PENDING"] and len(seen) == 2


@pytest.mark.parametrize("difference", [{"j5": "another name"}, {}])
def test_a_pyslurm_that_tells_another_job_or_node_does_not_agree(tmp_path: Path, difference: dict[str, str]) -> None:
    model = slurm(**(difference or {"j5": "a | b"}))
    if not difference:
        model.nodes["n1"].weight = 2
    assert not PyslurmClient(reader(tmp_path, jobs="Job(5),"), model).agrees()


@pytest.mark.parametrize("behaviour", ["import os; os._exit(1)", "time.sleep(3600)", "print('{\"nodes\"')"])
def test_a_pyslurm_that_dies_hangs_or_raves_is_given_up(tmp_path: Path, behaviour: str) -> None:
    model = slurm()
    client = PyslurmClient(reader(tmp_path, behaviour), model, timeout_s=0.2)
    assert [node.name for node in client.nodes()] == ["n1", "n2"]
    seen = asked(model)
    assert len(client.nodes()) == 2
    assert seen == ["scontrol"]


def test_a_pyslurm_that_ends_its_process_at_once_is_none() -> None:
    with pytest.raises(PyslurmLost):
        PyslurmReader([sys.executable, "-c", "import os; os._exit(1)"])
    with pytest.raises(PyslurmLost):
        PyslurmReader(["/no/such/python"])


def test_without_pyslurm_the_commands_serve() -> None:
    none = which_client.which(pytest.fail, installed=lambda: False, reader=lambda: pytest.fail("there is no pyslurm"))
    assert type(none) is CommandClient


def test_why_a_pyslurm_that_is_installed_is_not_used_is_told() -> None:
    def lost() -> PyslurmReader:
        return PyslurmReader(["/no/such/python"])

    notes: list[str] = []
    assert type(which_client.which(notes.append, installed=lambda: True, reader=lost)) is CommandClient
    (note,) = notes
    assert note.startswith("pyslurm is not used, Slurm's commands are: pyslurm's process cannot be started")
