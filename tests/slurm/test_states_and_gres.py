"""States and generic resources, as Slurm writes them and as nobody has seen them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.slurm.client.gres import Gres, parse_gres
from resilio_hpc.slurm.client.json_values import limit, moment, texts, whole
from resilio_hpc.slurm.client.states import job_state, node_state


@pytest.mark.parametrize(
    ("words", "base", "flags"),
    [
        (["IDLE"], "IDLE", set()),
        (["idle"], "IDLE", set()),
        (["IDLE", "DRAIN", "PLANNED"], "IDLE", {"DRAIN", "PLANNED"}),
        (["IDLE+DRAIN+PLANNED"], "IDLE", {"DRAIN", "PLANNED"}),
        (["idle+drain+not_responding"], "IDLE", {"DRAIN", "NOT_RESPONDING"}),
        (["drained*"], "IDLE", {"DRAIN", "NOT_RESPONDING"}),
        (["draining"], "ALLOCATED", {"DRAIN"}),
        (["mix-"], "MIXED", {"PLANNED"}),
        (["DOWN", "POWERED_DOWN", "NEW_IN_29.05"], "DOWN", {"POWERED_DOWN", "NEW_IN_29.05"}),
        ([], "UNKNOWN", set()),
        ([""], "UNKNOWN", set()),
        (["UNKNOWN"], "UNKNOWN", set()),
        (["DRAIN"], "UNKNOWN", {"DRAIN"}),
        (["SPARKLING"], "UNKNOWN", {"SPARKLING"}),
        (["IDLE", "DOWN"], "UNKNOWN", set()),
    ],
)
def test_a_nodes_state(words: list[str], base: str, flags: set[str]) -> None:
    state = node_state(words)
    assert (state.base, state.flags) == (base, flags)
    assert state.known == (base != "UNKNOWN")
    assert state.drain == ("DRAIN" in flags)


def test_unknown_is_neither_failed_nor_healthy() -> None:
    assert not node_state(["SPARKLING"]).in_service
    assert not job_state(["SPARKLING"]).ended
    assert not job_state(["COMPLETING"]).known
    assert job_state(["FAILED"]).ended
    assert not job_state(["RUNNING", "COMPLETING"]).ended
    assert node_state(["MIXED", "PLANNED"]).in_service
    assert not node_state(["MIXED", "DRAIN"]).in_service


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:h100:8(S:0-3)", [Gres("gpu", "h100", 8, sockets="0-3")]),
        ("gpu:2(IDX:0,3)", [Gres("gpu", "", 2, indices="0,3")]),
        ("gpu:h100:0(IDX:N/A)", [Gres("gpu", "h100", 0)]),
        ("gpu:a100_1g.5gb:7(S:0),gpu:a100_3g.20gb:1(S:1)",
         [Gres("gpu", "a100_1g.5gb", 7, sockets="0"), Gres("gpu", "a100_3g.20gb", 1, sockets="1")]),
        ("gpu:1(IDX:0,2),shard:h100:4(1/4,3/4)",
         [Gres("gpu", "", 1, indices="0,2"), Gres("shard", "h100", 4, detail="1/4,3/4")]),
        ("gres:gpu:2", [Gres("gpu", "", 2)]),
        ("gres/gpu:h100:2", [Gres("gpu", "h100", 2)]),
        ("bandwidth:lustre:no_consume:4G", [Gres("bandwidth", "lustre", 4 << 30)]),
        ("nic", [Gres("nic")]),
        ("gpu:h100", [Gres("gpu", "h100")]),
        ("", []), ("(null)", []), ("N/A", []),
        ("gpu:h100:8(S:0-3", [Gres("gpu", "h100", 8, sockets="0-3")]),
    ],
)  # fmt: skip
def test_generic_resources(text: str, expected: list[Gres]) -> None:
    assert list(parse_gres(text)) == expected


@given(st.text(alphabet="gpu:,()0IDX/S-KN\x00é ", max_size=40))
def test_no_text_stops_the_reading_of_resources(text: str) -> None:
    assert all(one.count is None or one.count >= 0 for one in parse_gres(text))


def test_numbers_in_every_form_that_slurm_has_written_them() -> None:
    assert whole({"set": True, "infinite": False, "number": 7}) == whole(7) == whole("7") == 7
    assert whole({"set": False, "infinite": False, "number": 7}) is None
    assert limit({"set": False, "infinite": True, "number": 0}) == math.inf  # as 24.11 and 26.05 print it
    assert limit({"set": True, "infinite": True, "number": 0}) == math.inf
    assert limit(4294967295) == math.inf
    assert whole(4294967295) is whole(4294967294) is whole(None) is whole(True) is whole("many") is whole([3]) is None
    assert whole({"number": 3}) == 3
    assert whole({}) is whole({"set": True}) is whole({"set": True, "number": None}) is None
    assert whole(float("nan")) is None
    assert limit(10**400) is None
    assert moment(0) is moment({"set": True, "infinite": False, "number": 0}) is None
    assert texts("a,b") == texts(["a", "b"]) == texts(["a", None, "b", 3]) == ("a", "b")
    assert texts(None) == texts("") == texts("(null)") == ()
