"""What a save takes comes back as it was, whatever it is; what it does not take it names."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from resilio_hpc.ckpt import Checkpointer, rng_state, set_rng_state
from resilio_hpc.ckpt.state import tensors
from resilio_hpc.ckpt.state.decoded_tree import decode, replaced
from resilio_hpc.ckpt.state.tree import check_reads_back, flatten
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.difference import differences
from resilio_hpc.core.errors import LayoutMismatch, UsageError
from tests.support.ckpt.any_state import REFUSED, bits, plain, same, states, views
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # a state's own operations warn


@pytest.fixture(scope="module")
def checkpointer(tmp_path_factory: pytest.TempPathFactory) -> Checkpointer:
    return Checkpointer(tmp_path_factory.mktemp("any"), keep_last=1)


def comes_back(checkpointer: Checkpointer, state: Any) -> None:
    checkpointer.save(1, {"state": state}).wait(timeout_s=60)
    found = checkpointer.restore()
    assert found is not None
    assert same(found[1]["state"], state)


QUICK = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=1500, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck))


@QUICK
@given(st.lists(states, min_size=3, max_size=6))
def test_any_state_is_restored_to_the_last_bit(checkpointer: Checkpointer, state: Any) -> None:
    comes_back(checkpointer, state)


@pytest.mark.slow
@LONG
@given(states)
def test_any_state_is_restored_to_the_last_bit_many_times(checkpointer: Checkpointer, state: Any) -> None:
    comes_back(checkpointer, state)


@settings(max_examples=60, deadline=None)
@given(st.lists(plain, max_size=8))
def test_any_plain_value_is_read_as_it_was_written(values: list[Any]) -> None:
    flat = flatten(values)
    check_reads_back(flat)
    assert same(decode(flat.tree), values)


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_held_is_refused_by_its_place(word: str) -> None:
    with pytest.raises(UsageError, match=rf"^state\['a'\]\[1\]\[2\]: .*{word}") as raised:
        flatten({"a": [0, ("x", "y", REFUSED[word])]})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("word", ["Pair", "Color", "Text"])
def test_a_key_that_cannot_be_held_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=rf"^state\['a'\] as the key .*{word}"):
        flatten({"a": {1: 0, REFUSED[word]: 1}})


class Gives:
    """An object whose state is what it was made with."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [torch.ones(2), np.ones(2), 7, [torch.ones(2), 1], (1, {"a": np.ones(1)}), None])
def test_an_object_may_have_any_state(state: Any, checkpointer: Checkpointer) -> None:
    checkpointer.save(1, {"object": Gives(state), "x": 1}).wait(timeout_s=60)
    live = Gives(0)
    assert checkpointer.restore({"object": live, "x": 0}) is not None
    assert same(live.state, state)


def test_an_object_that_gives_another_one_is_refused() -> None:
    gives_itself = Gives(0)
    gives_itself.state = gives_itself
    for state in (gives_itself, Gives(Gives(1))):
        with pytest.raises(UsageError, match=r"state\['o'\]: state_dict\(\) of a Gives .* gives another object"):
            flatten({"o": state})


def freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_off() -> torch.Tensor:
    tensor = torch.ones(8)[3:7]
    tensor.untyped_storage().resize_(24)
    return tensor


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(8)


@pytest.mark.parametrize("make", [freed, cut_off, fake, lambda: torch._efficientzerotensor(3)])
def test_a_tensor_without_memory_of_its_own_is_refused(make: Any) -> None:
    module = torch.nn.Module()
    module.register_buffer("mask", make())
    with pytest.raises(UsageError, match=r"^state\['m'\]\['mask'\]: "):
        flatten({"m": module})


def test_numpys_whole_numbers_are_steps(checkpointer: Checkpointer) -> None:
    checkpointer.save(np.int64(5), {"n": 1}).wait(timeout_s=60)
    assert checkpointer.restore(step=np.uint8(5)) == (5, {"n": 1})
    for wrong in (True, np.bool_(True), np.float64(1), 1.0, np.int8(-1), "1"):
        with pytest.raises(UsageError, match="is not a whole number from 0 on"):
            checkpointer.save(wrong, {})  # type: ignore[arg-type]


def test_a_structure_that_would_not_come_back_is_refused_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flatten({"a": [1, {"b": 2.5}], "c": torch.ones(1)})
    check_reads_back(flat)
    spoiled = type(flat)(flat.tree.replace(b"2.5", b"2.50"), flat.leaves)
    with pytest.raises(UsageError, match=r"^state"):
        check_reads_back(spoiled)


def test_millions_of_numbers_take_no_step_of_python_each(checkpointer: Checkpointer) -> None:
    """What is plain JSON comes through as the very same containers."""
    many = list(range(50_000))
    state = {"list": many, "dict": {number: number for number in many}, "floats": [0.5] * 50_000, "set": set(many)}
    comes_back(checkpointer, state)
    assert decode(flatten(many).tree) == many
    assert replaced(many, lambda ref: ref) is many


def test_arrays_of_ml_dtypes_come_back(checkpointer: Checkpointer) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = [getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint2")]
    comes_back(checkpointer, [(np.arange(6).astype(kind).reshape(2, 3).T, kind(1), np.dtype(kind)) for kind in kinds])


# -- views -------------------------------------------------------------------------------------------------------------

bases = st.sampled_from([torch.complex64, torch.float32, torch.complex128, torch.float64]).flatmap(
    lambda dtype: st.integers(0, 1 << 30).map(
        lambda seed: torch.randn(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    )
)


@st.composite
def relatives(draw: Any, base: torch.Tensor) -> Any:
    """A view of the same memory: of some of it, lazily changed, as another dtype, as real numbers."""
    found = draw(views(base))
    kind = draw(st.sampled_from(["as it is", "bytes", "real", "imag", "conj imag", "as_strided", "detached"]))
    if found.is_complex() and kind in ("real", "imag", "conj imag"):
        found = found.conj().imag if kind == "conj imag" else getattr(found, kind)
    elif kind == "bytes" and not (found.is_conj() or found.is_neg()) and found.ndim and found.stride(-1) == 1:
        found = found.view(torch.int32)
    elif kind == "as_strided" and not (found.is_conj() or found.is_neg()):
        stride = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (0, 1)]))
        found = found.as_strided((2, 2), stride, draw(st.integers(0, 3)))
    return found


@settings(max_examples=60, deadline=None)
@given(bases.flatmap(lambda base: st.lists(relatives(base), min_size=2, max_size=4)))
def test_two_views_are_one_tensor_only_if_all_their_bits_are_the_same(some: list[torch.Tensor]) -> None:
    flat = flatten(some)
    found = [flat.leaves[ref.index].value for ref in decode(flat.tree)]
    for one, other in zip(some, found, strict=True):
        assert same(one, other)


def test_views_that_are_told_apart_come_back(checkpointer: Checkpointer) -> None:
    base = torch.arange(12, dtype=torch.float32).view(torch.complex64).reshape(2, 3)
    state = {
        "base": base, "conj": base.conj(), "imag": base.imag, "negated": base.conj().imag, "t": base.t(),
        "bytes": base.view(torch.float32), "tail": base[1:], "again": base,
    }  # fmt: skip
    comes_back(checkpointer, state)
    assert len(flatten(state).leaves) == len(state) - 1
    record = np.zeros(3, [("a", "<f4"), ("b", "<i4")])
    two = {"one": record, "other": record.view([("b", "<i4"), ("a", "<f4")]), "raw": record.view("V8")}
    comes_back(checkpointer, two)
    assert bits(base.conj()) != bits(base)


def test_a_restore_of_half_precision_complex_numbers_warns_of_nothing() -> None:
    program = (
        "from resilio_hpc.ckpt.state import tensors\n"
        "for shape in ((3, 2), (), (0, 3)):\n"
        "    made = tensors.empty('torch', 'complex32', shape)\n"
        "    assert (str(made.dtype), tuple(made.shape)) == ('torch.complex32', shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr  # torch warns once in each process, so it has to be a new one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.complex128, torch.float32], ids=str)
def test_a_view_of_one_element_or_none_has_any_stride(checkpointer: Checkpointer, dtype: torch.dtype) -> None:
    whole = torch.arange(6).to(dtype)
    views_of_it = [whole[5::2], whole[5::7], whole[6::2], whole.reshape(2, 3)[:, 3::2], whole[:0].conj()]
    assert [view.numel() for view in views_of_it] == [1, 1, 0, 0, 0]
    assert views_of_it[0].stride() == (2,)
    comes_back(checkpointer, views_of_it)
    live = [torch.zeros(6).to(dtype)[5::2], torch.zeros(8).to(dtype)[7::7]]
    checkpointer.save(2, {"state": [whole[5::2], whole[5::7]]}).wait(timeout_s=60)
    checkpointer.restore({"state": live})
    assert same(live, [whole[5::2], whole[5::7]])


def strides_of(value: Any) -> Any:
    return value.stride() if torch.is_tensor(value) else value.strides


def test_new_tensors_lie_in_memory_as_those_that_were_saved(checkpointer: Checkpointer) -> None:
    """Kernels round otherwise for another order, so training would not go on with the same bits."""
    image = torch.arange(120.0).reshape(2, 3, 4, 5)
    state = {
        "last": image.to(memory_format=torch.channels_last),
        "one": torch.ones(4, 1, 3, 3).to(memory_format=torch.channels_last),
        "t": image[0, 0].t(),
        "half": image.half().permute(2, 0, 3, 1),
        "complex": torch.randn(2, 3, dtype=torch.complex64).t(),
        "rows": image,
        "fortran": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
        "swapped": np.ones((2, 3, 4)).transpose(1, 2, 0),
        "records": np.zeros((2, 3), [("a", "<f4"), ("b", "<i8")]).T,
    }
    checkpointer.save(1, {"state": state, "object": Gives({"ema": state["last"]})}).wait(timeout_s=60)
    live = Gives(0)
    found = checkpointer.restore({"state": {}, "object": live})
    assert found is not None
    assert same(found[1]["state"], state)
    for name, value in found[1]["state"].items():
        assert strides_of(value) == strides_of(state[name]), name
    assert live.state["ema"].stride() == state["last"].stride()


def test_another_number_of_a_tensor_in_columns_is_no_difference(tmp_path: Path) -> None:
    columns, checkpoint = torch.ones(2, 3).t(), Checkpointer(tmp_path)
    checkpoint.save(1, {"x": columns}).wait(timeout_s=60)
    checkpoint.save(2, {"a": 1, "b": torch.ones(1), "x": columns}).wait(timeout_s=60)
    one, other = ((tmp_path, checkpoint_index.manifest_of(tmp_path, step)) for step in (1, 2))
    assert [found.path for found in differences(one, other)] == ["b", "a", "b"]


def test_views_that_leave_something_out_are_restored_in_rows(checkpointer: Checkpointer) -> None:
    image = torch.arange(120.0).reshape(2, 3, 4, 5)
    state = [image[:, ::2], image[0].expand(2, 3, 4, 5), image.permute(3, 0, 1, 2)[::2]]
    checkpointer.save(1, {"state": state}).wait(timeout_s=60)
    found = checkpointer.restore()
    assert found is not None
    assert same(found[1]["state"], state)
    assert all(value.is_contiguous() for value in found[1]["state"])


@example([1 << 70], [1])
@example([-1, 1], [1, 2])
@given(st.lists(st.integers(0, 1 << 70), min_size=1, max_size=4), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_strides_that_are_none_change_no_shape(strides: list[int], shape: list[int]) -> None:
    for kind, dtype in (("torch", "float32"), ("numpy", "<f4")):
        made = tensors.empty(kind, dtype, tuple(shape), tuple(strides))  # type: ignore[arg-type]
        assert tuple(made.shape) == tuple(shape)
        assert made.nbytes == 4 * math.prod(shape)


def test_numbers_of_any_length_are_values(checkpointer: Checkpointer) -> None:
    state = [10**5000, Fraction(10**5000, 3), range(10**5000)]
    checkpointer.save(1, state).wait(timeout_s=60)
    assert checkpointer.restore() == (1, state)


def test_another_generator_of_numpy_comes_back() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        state = decode(flatten(rng_state()).tree)
        expected = np.random.random(3)
        set_rng_state({**rng_state(), "numpy": state["numpy"]})
        assert np.array_equal(np.random.random(3), expected)
    finally:
        np.random.set_bit_generator(before)
    with pytest.raises(LayoutMismatch, match="numpy's generator does not fit"):
        set_rng_state({**rng_state(), "numpy": state["numpy"]})
