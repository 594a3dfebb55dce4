"""Any state comes back exactly as it went in: values, types, order, bits."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.ckpt.state.decoded_tree import TensorRef, decode
from resilio_hpc.ckpt.state.paths import component
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError


def back(state: Any) -> Any:
    """Flatten and decode; tensors come back as the very objects."""
    flat = flatten(state)

    def fill(node: Any) -> Any:
        if isinstance(node, TensorRef):
            return flat.leaves[node.index].value
        if isinstance(node, dict):
            return type(node)({key: fill(value) for key, value in node.items()})
        if isinstance(node, list):
            return [fill(item) for item in node]
        return tuple(fill(item) for item in node) if type(node) is tuple else node

    return fill(decode(flat.tree))


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, dict):
        return [*left] == [*right] and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(st.characters(categories=["Cs"]), max_size=2),
    st.binary(max_size=20),
    st.complex_numbers(allow_nan=False),
)
keys = st.one_of(st.text(max_size=5), st.sampled_from(["$tuple", "$", "0", "-1", ""]), st.integers(), st.booleans())
states = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=20,
)


@settings(max_examples=300)
@given(states)
def test_plain_values_come_back_with_their_types(state: Any) -> None:
    assert same(back(state), state)


@pytest.mark.parametrize(
    "value",
    [
        random.getstate(),
        Counter({3: 1, 5: 2}),
        {1, 2, "a"},
        frozenset([(1, 2)]),
        bytearray(b"ab"),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda:1"),
        np.dtype("<f4"),
        np.float32(0.1),
        np.int64(-5),
        np.str_("µ"),
        np.str_(""),
        {(1, "a"): None, 2.5: 1, None: 2, b"k": 3},
        1 << 200,
        -0.0,
        struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0],
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_the_libraries_come_back(value: Any) -> None:
    found = back({"value": value})["value"]
    assert same(found, value) or (type(found) is type(value) and found == value)


def test_numpys_own_generator_state_comes_back() -> None:
    generator = np.random.default_rng(7)
    state = back(generator.bit_generator.state)
    expected = generator.random(5)
    other = np.random.default_rng(0)
    other.bit_generator.state = state
    assert (other.random(5) == expected).all()


@given(st.lists(keys, min_size=2, max_size=30, unique_by=lambda key: (type(key), key)))
def test_two_keys_of_one_dict_never_share_a_path(names: list[Any]) -> None:
    parts = [component(key) for key in names]
    assert len(set(parts)) == len(parts)
    assert all(part not in ("", ".", "..") and "/" not in part and "\0" not in part for part in parts)


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Odd(), "Odd"),
        (print, "builtin_function"),
        (np.array([object()]), "dtype object"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (np.ma.array([1]), "MaskedArray"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_place(value: Any, what: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s)state\['a'\]\[1\].*{what}"):
        flatten({"a": [0, value]})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(UsageError, match="contain itself"):
        flatten(state)


def test_the_same_tensor_twice_is_stored_once() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    flat = flatten({"a": weight, "b": weight, "view": weight[1:], "empty": torch.zeros(0), "empty2": torch.zeros(0)})
    assert [leaf.path for leaf in flat.leaves] == ["a", "view", "empty", "empty2"]


@pytest.mark.parametrize(
    "tree",
    [
        b"",
        b"{",
        b'{"$unknown": 1}',
        b'{"$tensor": -1}',
        b'{"$tensor": "x"}',
        b'{"$bytes": "*"}',
        b'{"$dict": [[[1], 2]]}',
        b'{"$torch_dtype": "nn"}',
        b'{"$torch_dtype": "load"}',
        b'{"$numpy_dtype": "O"}',
        b'{"$scalar": ["|O8", ""]}',
        b'{"$float": "00"}',
        b'{"$int": "' + b"z" * 10 + b'"}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_tree_is_reported_as_such(tree: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode(tree)


def test_infinities_keep_their_sign() -> None:
    assert back([math.inf, -math.inf]) == [math.inf, -math.inf]
