"""Lists of nodes as they travel: the same ones come out, a long one is short, and a wrong one is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.launch.protocol.node_list import NodeEntry, NodeList
from resilio_hpc.slurm.client.hostlist import compress, expand

names = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,3}(-?[0-9]{1,3})?", fullmatch=True), unique=True, max_size=30)


@given(names)
def test_a_compressed_host_list_gives_the_same_names_in_the_same_order(nodes: list[str]) -> None:
    assert expand(compress(nodes)) == nodes


def test_names_that_count_up_are_one_range() -> None:
    assert compress([f"n{i:02}" for i in range(8, 12)]) == "n[08-11]"
    assert compress(["n9", "n10", "n11", "login", "n3"]) == "n[9-11],login,n3"
    assert compress(["n10", "n9"]) == "n10,n9"


@given(names, st.data())
def test_a_node_list_gives_back_its_entries(nodes: list[str], data: st.DataObject) -> None:
    entries = [
        NodeEntry(node, data.draw(st.sampled_from([node, "127.0.0.1"])), data.draw(st.integers(0, 3))) for node in nodes
    ]
    node_list = NodeList.of(entries)
    assert list(node_list.entries()) == entries
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(node_list), type=NodeList) == node_list


def test_four_thousand_nodes_take_a_hundred_bytes() -> None:
    node_list = NodeList.of([NodeEntry(f"node{i:04}", f"node{i:04}", 8) for i in range(4000)])
    assert len(msgspec.msgpack.encode(node_list)) < 100


@pytest.mark.parametrize(
    "fields",
    [
        {"names": "n[1-3", "addresses": [], "numbers": []},
        {"names": "n[1-3]", "addresses": [[2, ""]], "numbers": [[3, 8]]},
        {"names": "n[1-3]", "addresses": [[3, ""]], "numbers": [[4, 8]]},
        {"names": "n1", "addresses": [[-1, ""], [2, ""]], "numbers": [[1, 8]]},
        {"names": "n[1-9999999]", "addresses": [], "numbers": []},
    ],
)
def test_a_node_list_that_does_not_fit_together_is_refused_where_it_is_decoded(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=NodeList)
