"""Which requests can never be met, and which reasons are told: those of the user's own mistake among them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from resilio_hpc.slurm.client.gres import Gres
from resilio_hpc.slurm.client.model import Node, Partition
from resilio_hpc.slurm.client.states import node_state
from resilio_hpc.slurm.submit.limits import SiteLimits, mebibytes, never_starts, seconds


def node(name: str, *partitions: str, gpus: int = 4, state: str = "idle", **more: Any) -> Node:
    shape: dict[str, Any] = {"cpus": 64, "memory_mb": 256_000, "gres": (Gres("gpu", "h100", gpus),) if gpus else ()}
    return Node(name, node_state([state]), partitions, **{**shape, **more})


SITE = SiteLimits(
    (
        Partition("gpu", "UP", default=True, max_time_s=86400.0, max_nodes=math.inf, min_nodes=1),
        Partition("short", "UP", max_time_s=3600.0, max_nodes=2, min_nodes=2),
        Partition("cpu", "UP", max_time_s=math.inf),
        Partition("cloud", "UP", max_time_s=math.inf),
    ),
    (
        *(node(f"g{number}", "gpu", "short", state="down" if number == 3 else "idle") for number in (1, 2, 3)),
        *(node(f"c{number}", "cpu", gpus=0, features=("ib",) if number == 1 else ()) for number in (1, 2)),
    ),
    largest_array=1001,
)


@pytest.mark.parametrize(
    ("options", "own", "said"),
    [
        ("nodes=3 gpus_per_node=4 time=24:00:00", "nodes", ""),
        ("nodes=5", "nodes", "nodes=5: partition gpu has 3"),
        ("nodes=2-9", "nodes", ""),  # as many as there are
        ("nodes=3 exclude=g[1-2],x7", "nodes exclude", "nodes=3: partition gpu has 1 without g[1-2],x7"),
        # the template's eight GPUs do not hide the user's own mistake, nor the other way round
        ("nodes=5 gpus_per_node=8", "nodes",
         "nodes=5: partition gpu has 3; gpus_per_node=8 (the template's): nodes of partition gpu have 4 GPUs at most"),
        ("gpus_per_node=a100:2", "gpus_per_node", "nodes of partition gpu have 0 GPUs of type a100 at most"),
        ("gres=gpu:h100:5", "gres", "gres=gpu:h100:5: nodes of partition gpu have 4 GPUs of type h100 at most"),
        ("time=2-0", "time", "time=2-0: partition gpu allows 1-00:00:00"),
        ("time=UNLIMITED", "time", "partition gpu allows"),
        ("time=2-0 qos=long", "time qos", ""),  # a QOS may lift the limit
        ("nodes=9 qos=long", "nodes qos", "nodes=9: partition gpu has 3"),
        ("cpus_per_task=65", "cpus_per_task", "cpus_per_task=65: nodes of partition gpu have 64 CPUs at most"),
        ("cpus_per_task=16 ntasks_per_node=8", "cpus_per_task", "have 64 CPUs at most"),
        ("ntasks_per_node=65", "ntasks_per_node", "ntasks_per_node=65: nodes"),
        ("mem=1T", "mem", "mem=1T: nodes of partition gpu have 256000 MiB at most"),
        ("mem=0", "mem", ""),
        ("partition=short nodes=3 time=1:00:00", "partition nodes", "nodes=3: partition short allows 2"),
        ("partition=short nodes=1 time=30", "partition nodes", "nodes=1: partition short takes jobs from 2 nodes on"),
        ("partition=short,gpu nodes=3 time=60", "partition nodes", ""),  # one of them will do
        ("partition=short,cpu nodes=3 time=60", "partition nodes",
         "nodes=3: partition short allows 2; nodes=3: partition cpu has 2"),
        ("partition=cpu constraint=ib nodes=2", "constraint", "constraint=ib: 1 nodes of partition cpu have it"),
        ("partition=cpu constraint=[ib|eth] nodes=2", "constraint", ""),  # not ours to read
        ("partition=nowhere nodes=99", "partition", ""),  # sbatch says so
        ("partition=cloud nodes=99", "partition", ""),  # its nodes may be made when they are wanted
        ("array=0-1000%4", "array", ""),
        ("array=1,5-1001:2", "array", "the largest number of a task is 1000 (MaxArraySize=1001 of slurm.conf)"),
    ],
)  # fmt: skip
def test_what_can_never_start_is_said(options: str, own: str, said: str) -> None:
    words = dict(word.split("=", 1) for word in options.split())
    found = never_starts(words, own.split(), SITE)
    assert said in found and bool(found) == bool(said), found


def test_what_is_not_known_is_no_reason() -> None:
    vague = SiteLimits(SITE.partitions, (node("g1", "gpu", cpus=None, memory_mb=None),))
    assert never_starts({"cpus_per_task": "999", "mem": "9T"}, (), vague) == ""
    assert never_starts({"array": "0-9999999"}, (), vague) == ""
    assert never_starts({"nodes": "9"}, (), SiteLimits((), ())) == ""


def test_sbatchs_units() -> None:
    told = {"90": 5400, "1:30": 90, "2:00:00": 7200, "1-2": 93600, "1-2:30": 95400, "1-0:0:5": 86405}
    assert {text: seconds(text) for text in told} == told
    assert seconds("UNLIMITED") == math.inf and seconds("soon") is None
    assert [mebibytes(text) for text in ("500", "2G", "1TB", "0", "2048K")] == [500, 2048, 1024**2, 0, 2]
