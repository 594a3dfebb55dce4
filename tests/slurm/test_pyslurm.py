"""pyslurm in a process that may die, hang or lie: the commands serve instead. With a real one where it is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from resilio_hpc.slurm.client import which_client
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.pyslurm_client import PyslurmClient
from resilio_hpc.slurm.client.pyslurm_reader import PyslurmLost, PyslurmReader
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
"""


def reader(tmp_path: Path, behaviour: str = "pass") -> PyslurmReader:
    """The real child with a module named pyslurm that is not pyslurm."""
    (tmp_path / "pyslurm.py").write_text(PYSLURM.replace("BEHAVIOUR", behaviour))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = ["env", f"PYTHONPATH={path}", sys.executable, "-m", "resilio_hpc.slurm.client.pyslurm_child"]
    return PyslurmReader(command)


def slurm() -> FakeSlurmctld:
    return FakeSlurmctld({"n1": FakeNode(), "n2": FakeNode()})


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
    found = which_client.which(installed=lambda: False, reader=lambda: pytest.fail("there is no pyslurm"))
    assert type(found) is CommandClient
