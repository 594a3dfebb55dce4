"""What a command line would make of odd names and texts is refused before it is run."""

from __future__ import annotations

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client import orders


def test_orders_are_what_scontrol_reads() -> None:
    assert orders.drain(["n1", "n2", "n3", "x"], "a b") == [
        "scontrol", "update", "NodeName=n[1-3],x", "State=DRAIN", "Reason=a b",
    ]  # fmt: skip
    assert orders.undrain(["n1"]) == ["scontrol", "update", "NodeName=n1", "State=UNDRAIN"]
    assert orders.weight(["n1"], 7)[-1] == "Weight=7"
    assert orders.update_job("42_7", {"NumNodes": "4", "Comment": 'k="v" x'}) == [
        "scontrol", "update", "JobId=42_7", "NumNodes=4", 'Comment=k="v" x',
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["ALL", "all", "", "n[1-3]", "n1,n2", "n1 State=DOWN", "-n", "n\n1", "n" * 300])
def test_only_the_nodes_that_are_named_are_meant(name: str) -> None:
    with pytest.raises(UsageError, match="name of a node"):
        orders.undrain(["n1", name])


def test_no_node_is_not_every_node() -> None:
    with pytest.raises(UsageError, match="no node"):
        orders.undrain([])


@pytest.mark.parametrize("text", ['"x', 'x"', "'x", "a\nb", "a\x1b[2Jb"])
def test_a_text_that_slurm_would_change_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="Slurm would not keep"):
        orders.drain(["n1"], text)
    with pytest.raises(UsageError, match="Slurm would not keep"):
        orders.update_job("7", {"Comment": text})


@pytest.mark.parametrize("job", ["", "all", "-u", "7 8", "7;8", "7_[1-3]", "*", "0x7"])
def test_only_the_job_that_is_named_is_meant(job: str) -> None:
    with pytest.raises(UsageError, match="job's number"):
        orders.update_job(job, {"Comment": "x"})


def test_other_mistakes() -> None:
    with pytest.raises(UsageError, match="must say something"):
        orders.drain(["n1"], "  ")
    for changes in ({}, {"JobId": "8"}, {"Num Nodes": "3"}, {"": "x"}, {"a=b": "c"}):
        with pytest.raises(UsageError, match="field of a job"):
            orders.update_job("7", changes)
    with pytest.raises(UsageError, match="weight"):
        orders.weight(["n1"], -1)
