"""The next job's excluded nodes: the user's own stay, ours come and go. With real Slurm: tests/slurm/node_faults."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.core.ledger import Ledger, read_ledger
from resilio_hpc.launch.chain import node_exclusion
from resilio_hpc.launch.chain.node_exclusion import avoid_faulty_nodes, decide_change, faulty_nodes, ours_of
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.states import node_state
from resilio_hpc.slurm.node_faults.exclusion import Exclusion
from resilio_hpc.slurm.node_faults.fault import NodeFault
from resilio_hpc.slurm.node_faults.ledger import FaultLedger, users_directory


def change(fields: dict[str, str], ours: Collection[str], chosen: Sequence[str]) -> tuple[list[str], list[str]] | None:
    asked: list[tuple[int, Collection[str]]] = []

    def choose_of(needed: int, by_hand: Collection[str]) -> Exclusion:
        asked.append((needed, by_hand))
        return Exclusion(tuple(name for name in chosen if name not in by_hand))

    found = decide_change({"NumNodes": "2-4", "Reservation": "(null)", **fields}, ours, choose_of)
    assert all(needed == 4 for needed, _ in asked)
    return None if found is None else (list(found.nodes), list(found.ours))


@pytest.mark.parametrize(
    ("excluded", "ours", "chosen", "expected"),
    [
        ("(null)", [], [], None),
        ("(null)", [], ["n3"], (["n3"], ["n3"])),
        ("n5", [], ["n3"], (["n3", "n5"], ["n3"])),
        ("n[3,5]", ["n3"], ["n3"], None),
        ("n[3,5]", ["n3"], [], (["n5"], [])),  # n3 is forgiven, n5 was never ours
        ("n[3,5]", [], [], None),  # both are the user's
        ("n3", [], ["n3"], None),  # what the user avoids already is not ours
        ("n3", ["n3"], [], ([], [])),
    ],
)
def test_the_users_own_stay_and_ours_come_and_go(
    excluded: str, ours: list[str], chosen: list[str], expected: tuple[list[str], list[str]] | None
) -> None:
    assert change({"ExcNodeList": excluded}, ours, chosen) == expected


def test_nodes_that_the_job_must_have_and_reservations_are_left_alone() -> None:
    assert change({"ReqNodeList": "n[3-4]"}, [], ["n3", "n7"]) == (["n7"], ["n7"])
    assert change({"Reservation": "gala"}, [], ["n3"]) is None
    assert change({"Reservation": "gala", "ExcNodeList": "n3"}, ["n3"], ["n3"]) == ([], [])


def test_whose_they_are_is_known_from_link_to_link(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    environment = {"RESILIO_EXCLUDED": "n[1-2]"}  # from resilio submit
    assert ours_of(tmp_path, "8", "7", environment) == ("n1", "n2")
    (tmp_path / "links" / "7.excluded.json").write_text('{"v": 1, "nodes": ["n4"]}')  # inherited from this job
    assert ours_of(tmp_path, "8", "7", environment) == ("n4",)
    (tmp_path / "links" / "8.excluded.json").write_text('{"v": 1, "nodes": []}')
    assert ours_of(tmp_path, "8", "7", environment) == ()
    assert ours_of(tmp_path, "9", "5", {"RESILIO_EXCLUDED": "n[1-"}) == ()


class Slurm:
    """A stand-in for the client and ``scontrol show job``: five nodes, a pending job 8."""

    def __init__(self) -> None:
        self.fields = {"JobState": "PENDING", "NumNodes": "2", "Partition": "main", "ExcNodeList": "n5"}
        self.ordered: list[dict[str, str]] = []
        self.broken = False

    @property
    def orders(self) -> Slurm:
        return self

    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(f"n{n}", node_state(["IDLE"]), partitions=("main",)) for n in range(1, 6))

    def update_job(self, job: str, changes: dict[str, str]) -> None:
        assert job == "8"
        if self.broken:
            raise SlurmError("Unable to contact slurm controller")
        self.ordered.append(changes)
        self.fields["ExcNodeList"] = changes["ExcNodeList"]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm()
    monkeypatch.setattr(node_exclusion, "CommandClient", lambda: made)
    monkeypatch.setattr(node_exclusion.commands, "job_fields", lambda job: made.fields)
    monkeypatch.delenv("RESILIO_NODE_FAULTS", raising=False)
    monkeypatch.delenv("RESILIO_EXCLUDED", raising=False)
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    return made


def run_with_a_lost_node(folder: Path, node: str = "n2") -> Path:
    run = folder / "runs" / "one"
    (run / "links").mkdir(parents=True)
    (run / "run.json").write_text('{"run_id": "abc", "version": 1}')
    ledger = Ledger(run / "ledger", "w")
    ledger.append("launch", job="7", mode="batch", nodes=["n1", node])
    ledger.append("node_lost", node=node, silent_s=5.0)
    ledger.close()
    return run


def refresh(run: Path) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    avoid_faulty_nodes(run, "7", ["n1", "n2"], "8", lambda kind, **fields: told.append({"event": kind, **fields}))
    return told


def test_what_a_run_learns_is_kept_once_and_said_with_its_reason(tmp_path: Path, slurm: Slurm) -> None:
    run = run_with_a_lost_node(tmp_path)
    (told,) = refresh(run)
    assert (told["event"], told["job"], told["nodes"]) == ("excludes", "8", ["n2"])
    assert "n2: score 1.00: node-lost 1" in told["why"]
    assert slurm.ordered == [{"ExcNodeList": "n2,n5"}]
    assert refresh(run) == []
    assert len(FaultLedger(next((tmp_path / "runs").glob("resilio-node-faults-*"))).read().faults) == 1
    assert json.loads((run / "links" / "8.excluded.json").read_text())["nodes"] == ["n2"]


def test_what_is_forgotten_is_no_longer_avoided(tmp_path: Path, slurm: Slurm) -> None:
    run = run_with_a_lost_node(tmp_path)
    refresh(run)
    (folder,) = (tmp_path / "runs").glob("resilio-node-faults-*")
    FaultLedger(folder).append([NodeFault(time=time.time() + 1, node="n2", kind="forgotten")])
    (told,) = refresh(run)
    assert told["nodes"] == []
    assert slurm.ordered[-1] == {"ExcNodeList": "n5"}


def test_a_slurm_that_does_not_answer_costs_a_line_and_the_next_try_knows_whose_they_are(
    tmp_path: Path, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with_a_lost_node(tmp_path)
    slurm.broken = True
    assert refresh(run) == []
    assert "Unable to contact" in capsys.readouterr().err
    slurm.broken, slurm.fields["ExcNodeList"] = False, "n2,n5"  # it had been carried out after all
    (folder,) = (tmp_path / "runs").glob("resilio-node-faults-*")
    FaultLedger(folder).append([NodeFault(time=time.time() + 1, node="n2", kind="forgotten")])
    refresh(run)
    assert slurm.ordered == [{"ExcNodeList": "n5"}]


def test_a_job_that_runs_already_is_left(tmp_path: Path, slurm: Slurm) -> None:
    slurm.fields["JobState"] = "RUNNING"
    assert refresh(run_with_a_lost_node(tmp_path)) == []
    assert slurm.ordered == []


def test_where_memory_is_off_nothing_is_kept(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIO_NODE_FAULTS", "off")
    assert refresh(run_with_a_lost_node(tmp_path)) == []
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]


def test_a_place_that_cannot_be_written_costs_a_line(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RESILIO_NODE_FAULTS", str(tmp_path / "file"))
    assert refresh(run_with_a_lost_node(tmp_path)) == []
    assert "cannot be read: Not a directory" in capsys.readouterr().err


def test_faulty_are_nodes_that_are_remembered_and_those_that_this_run_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESILIO_NODE_FAULTS", raising=False)
    run = run_with_a_lost_node(tmp_path)
    folder = users_directory({}, run)
    assert folder is not None
    FaultLedger(folder).append([NodeFault(time=time.time(), node="n4", kind="node-lost", run="older", cluster="c")])
    events = read_ledger(run / "ledger")
    assert faulty_nodes(run, "abc", events, "c") == {"n2", "n4"}
    assert faulty_nodes(run, "abc", [], "other") == frozenset()
