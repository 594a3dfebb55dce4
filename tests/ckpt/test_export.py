"""Steps written in other programs' formats: those programs read every bit of them."""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from resilio_hpc.ckpt import rng_state
from resilio_hpc.ckpt.convert.export import Format, format_of
from resilio_hpc.core.errors import UsageError
from tests.support.ckpt.foreign_formats import ALL, export, flat, load, nothing_but, same, save, trained

safetensors_torch = pytest.importorskip("safetensors.torch")
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and str(value)[6] != "q"}
    - {torch.quint8, torch.quint4x2, torch.quint2x4},
    key=str,
)
BITS = {torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2}
INTEGERS_OF_A_FEW_BITS = {dtype for dtype in DTYPES if str(dtype)[-1] in "1234567" and str(dtype)[-4:-1] == "int"}
LACKS: dict[Format, set[torch.dtype]] = {
    "torch": INTEGERS_OF_A_FEW_BITS,
    "safetensors": INTEGERS_OF_A_FEW_BITS | BITS | {torch.complex32, torch.complex128},
    "dcp": INTEGERS_OF_A_FEW_BITS | BITS,
}


def sample(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8) * 7
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(4, 6)


@ALL
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_out_bit_by_bit_or_is_named(dtype: torch.dtype, form: Format, tmp_path: Path) -> None:
    tensor = torch.empty(4, 6, dtype=dtype)
    tensor.view(torch.uint8).copy_(sample(dtype).view(torch.uint8))
    save(tmp_path / "c", [{"x": {"y": tensor}}])
    if dtype in LACKS[form]:
        with pytest.raises(UsageError, match=rf"x/y has dtype {str(dtype).removeprefix('torch.')}, which "):
            export(tmp_path / "c", form)
        assert nothing_but(tmp_path, "c")
    else:
        target, notes = export(tmp_path / "c", form)
        assert same(load(target, form, {"x.y": tensor})["x.y"], tensor)
        assert notes == []


@ALL
def test_shapes_and_strides_of_all_kinds(form: Format, tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "transposed": torch.rand(5, 7).t(),
        "every other": torch.arange(20)[::2],
        "expanded": torch.rand(3, 1).expand(3, 4),
        "conjugate": torch.rand(3, dtype=torch.complex64).conj(),
        "large": torch.arange(9 << 20, dtype=torch.int64).reshape(3, -1),  # more than one room
    }
    save(tmp_path / "c", [state])
    target, _ = export(tmp_path / "c", form)
    found = load(target, form, state)
    assert set(found) == set(state)
    assert [name for name, tensor in state.items() if not same(found[name], tensor.resolve_conj())] == []


def test_a_torch_file_has_the_state_as_it_was(tmp_path: Path) -> None:
    parts = trained()
    weight = parts["model"][0].weight
    plain = {"n": 1 << 70, "inf": float("inf"), "t": (1, (2.5, None)), "s": {1, "a"}, "b": b"\0\xff", "c": 2j,
             7: "seven", "size": torch.Size([2]), "dtype": torch.float16, "text": "ä\ud800", "array": bytearray(b"x"),
             "e": {}, "random": rng_state()}  # fmt: skip
    save(tmp_path / "c", [{**parts, "tied": weight, "plain": plain, "odd": OrderedDict(b=1, a=torch.ones(2))}])
    target, notes = export(tmp_path / "c", "torch")
    found = torch.load(target, weights_only=True)
    assert found["plain"] == plain
    assert list(found) == ["model", "optimizer", "tied", "plain", "odd"]
    assert (type(found["odd"]), list(found["odd"])) == (OrderedDict, ["b", "a"])
    assert found["tied"].data_ptr() == found["model"]["0.weight"].data_ptr()
    assert found["model"]._metadata == parts["model"].state_dict()._metadata
    assert list(found["optimizer"]["state"]) == [0, 1, 2, 3]
    fresh = trained()
    fresh["model"].load_state_dict(found["model"])
    fresh["optimizer"].load_state_dict(found["optimizer"])
    assert same(fresh["model"][0].weight, weight)
    for mine, theirs in zip(flat(fresh["optimizer"].state_dict()), flat(parts["optimizer"].state_dict()), strict=True):
        assert same(mine[1], theirs[1])
    assert notes == []
    assert zipfile.ZipFile(target).testzip() is None  # the checksums of the archive are right, too


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_what_torch_lacks_is_converted_and_said_or_refused(form: Format, tmp_path: Path) -> None:
    state = {"a": np.arange(3, dtype="<i4"), "s": np.float32(2), "f": frozenset({1}), "t": (torch.ones(1), 2)}
    save(tmp_path / "c", [state])
    target, notes = export(tmp_path / "c", form)
    said = ["numpy arrays made torch tensors: 1", "numpy scalars made Python values: 1", "frozensets made sets: 1"]
    assert notes == said + (["tuples with tensors made lists: 1"] if form == "dcp" else [])
    like = {"a": torch.arange(3, dtype=torch.int32), "t.0": torch.ones(1)}
    assert all(same(load(target, form, like)[name], tensor) for name, tensor in like.items())
    for number, array in enumerate((np.array(["a"]), np.arange(2, dtype=">f4"), np.ones(2, dtype=np.longdouble))):
        save(tmp_path / str(number), [{"in": {"it": array}}])
        with pytest.raises(UsageError, match="in/it is an array of dtype"):
            export(tmp_path / str(number), form, name="other")


def test_safetensors_has_flat_names_and_the_plain_values_in_its_metadata(tmp_path: Path) -> None:
    parts = trained()
    save(tmp_path / "c", [{**parts, "tied": parts["model"][0].weight, "list": [torch.ones(1), {"x": torch.ones(2)}]}])
    target, _ = export(tmp_path / "c", "safetensors")
    found = safetensors_torch.load_file(target)
    assert same(found["tied"], parts["model"][0].weight)
    assert same(found["model.0.weight"], parts["model"][0].weight)
    assert same(found["optimizer.state.1.exp_avg"], parts["optimizer"].state_dict()["state"][1]["exp_avg"])
    assert {"list.0", "list.1.x"} < set(found)
    import safetensors

    with safetensors.safe_open(target, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert json.loads(metadata["resilio_state"])["tree"]["optimizer"]["param_groups"][0]["lr"] == 0.001


def test_a_dcp_folder_is_loaded_into_a_live_model_and_optimizer(tmp_path: Path) -> None:
    parts = trained()
    save(tmp_path / "c", [{**parts, "epoch": 3}])
    target, _ = export(tmp_path / "c", "dcp")
    fresh = trained()
    live = {"model": fresh["model"].state_dict(), "optimizer": fresh["optimizer"].state_dict(), "epoch": 0}
    dcp.load(live, checkpoint_id=target, no_dist=True)
    assert live["epoch"] == 3
    for mine, theirs in zip(flat(live), flat({name: part.state_dict() for name, part in parts.items()}), strict=True):
        assert mine[0] == theirs[0]
        assert same(mine[1], theirs[1])


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_two_tensors_of_one_name_are_refused(form: Format, tmp_path: Path) -> None:
    save(tmp_path / "c", [{"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}])
    with pytest.raises(UsageError, match=r"two tensors would have the name 'a.b'"):
        export(tmp_path / "c", form)
    assert nothing_but(tmp_path, "c")


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_name_that_is_no_text_is_refused(form: Format, tmp_path: Path) -> None:
    save(tmp_path / "c", [{"a\ud800": torch.ones(1)}])
    with pytest.raises(UsageError, match=r"a tensor's name is no text: 'a\\ud800'"):
        export(tmp_path / "c", form)
    assert nothing_but(tmp_path, "c")


def test_a_state_that_is_no_dict(tmp_path: Path) -> None:
    save(tmp_path / "c", [torch.ones(3)])
    assert torch.equal(torch.load(export(tmp_path / "c", "torch")[0], weights_only=True), torch.ones(3))
    assert list(safetensors_torch.load_file(export(tmp_path / "c", "safetensors")[0])) == ["state"]
    with pytest.raises(UsageError, match="a DCP folder holds a dict, and the state is a Tensor"):
        export(tmp_path / "c", "dcp")


def test_the_format_is_that_of_the_name(tmp_path: Path) -> None:
    names = {"a.pt": "torch", "a.pth": "torch", "b.bin": "torch", "c.safetensors": "safetensors", "d": "dcp"}
    assert {name: format_of(Path(name)) for name in names} == names
    (tmp_path / "v1.2").mkdir()
    assert format_of(tmp_path / "v1.2") == "dcp"
    with pytest.raises(UsageError, match="does not tell its format; give --format torch, safetensors or dcp"):
        format_of(Path("model.onnx"))
