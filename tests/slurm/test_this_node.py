"""What Slurm calls this machine, where that is not its host name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from resilio_hpc.core.errors import CommandError, SlurmError
from resilio_hpc.core.process import Completed
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.client.this_node import node_name

TOLD = "gpu001|host-a.example.org|\ngpu001|host-a.example.org|\ngpu002|host-b|\nn1|vm|\nn2|vm|\ntorn\n"


def sinfo(argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
    """One that tells of four nodes, two of which are on one host."""
    assert list(argv) == ["sinfo", "-a", "-h", "-N", "-O", "NodeList:|,NodeHost:|"]
    return Completed(tuple(argv), 0, TOLD, "")


def away(argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
    raise CommandError(argv, 1, stderr="slurm_load_partitions: Unable to contact slurm controller (connect failure)")


@pytest.mark.parametrize(
    ("host", "name"),
    [("host-a.example.org", "gpu001"), ("host-a", "gpu001"), ("HOST-B.example.org", "gpu002"), ("host-b", "gpu002")],
)
def test_the_node_is_known_by_its_node_host_name(host: str, name: str) -> None:
    assert node_name({}, host, sinfo) == name


def test_slurmd_or_the_site_knows_best() -> None:
    assert node_name({"SLURMD_NODENAME": "n2"}, "vm", away) == "n2"


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("vm", "the nodes n1, n2 with NodeHostName vm: set SLURMD_NODENAME"),
        ("login1", "no node with NodeHostName login1"),
    ],
)
def test_what_was_asked_is_named_where_slurm_knows_none_or_several(host: str, said: str) -> None:
    with pytest.raises(SlurmError, match=said):
        node_name({}, host, sinfo)


def test_a_slurm_that_is_away_is_no_answer() -> None:
    with pytest.raises(Unanswered):
        node_name({}, "host-a", away)
