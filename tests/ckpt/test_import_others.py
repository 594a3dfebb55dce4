"""Files as Hugging Face's libraries and numpy's users write them: several with an index, and numpy beside tensors."""

from __future__ import annotations

import datetime
import io
import json
import pathlib
import zipfile
from collections import OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resilio_hpc.ckpt import REPLICATED, Checkpointer
from resilio_hpc.ckpt.convert import numpy_pickles
from resilio_hpc.ckpt.convert.numpy_pickles import STAND_INS
from resilio_hpc.cli.ckpt import ckpt
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError
from tests.support.ckpt.any_state import same

safetensors_torch = pytest.importorskip("safetensors.torch")


def imported(source: Path, directory: Path) -> Any:
    assert ckpt.main(["import", str(source), str(directory), "1"]) == 0
    found = Checkpointer(directory, layout=REPLICATED).restore()
    assert found is not None
    return found[1]


def sharded(folder: Path, suffix: str = ".safetensors", **changed: Any) -> Path:
    """A model of two files: its index."""
    folder.mkdir()
    parts = {number: {f"layer.{number}": torch.full((2,), number + 0.5)} for number in (1, 2)}
    files = {f"model-0000{number}-of-00002{suffix}": part for number, part in parts.items()}
    for name, tensors in files.items():
        (safetensors_torch.save_file if suffix == ".safetensors" else torch.save)(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = folder / f"model{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map | changed}))
    return index


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("by_folder", [True, False])
def test_a_model_in_several_files_is_imported_by_its_index(suffix: str, by_folder: bool, tmp_path: Path) -> None:
    index = sharded(tmp_path / "m", suffix)
    (tmp_path / "m" / "config.json").write_text("{}")
    found = imported(index.parent if by_folder else index, tmp_path / "c")
    assert same(found, {"layer.1": torch.full((2,), 1.5), "layer.2": torch.full((2,), 2.5)})


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    """Hugging Face's cache holds links to its blobs."""
    index = sharded(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in index.parent.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert set(imported(tmp_path / "snapshot", tmp_path / "c")) == {"layer.1", "layer.2"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"layer.3": "model-00003-of-00003.safetensors"},
            "model-00003-of-00003.safetensors, which .* is missing",
        ),
        ({"layer.3": "model-00001-of-00002.safetensors"}, "does not hold layer.3, which"),
        (
            {"layer.1": "../elsewhere.safetensors"},
            "names a file that does not lie beside it",
        ),
        ({"layer.1": 3}, "is no index of a model in several files"),
    ],
)
def test_an_index_that_lies_is_told(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        imported(sharded(tmp_path / "m", **changed), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_of_two_models_in_a_folder_one_has_to_be_named(tmp_path: Path) -> None:
    index = sharded(tmp_path / "m")
    (index.parent / "other.safetensors.index.json").write_bytes(index.read_bytes())
    with pytest.raises(UsageError, match="holds several models"):
        imported(index.parent, tmp_path / "c")
    assert set(imported(index, tmp_path / "c")) == {"layer.1", "layer.2"}


NUMPY = {
    "scalars": [np.float64(0.1), np.int64(-3), np.bool_(True), np.float32("nan"), np.complex64(1j), np.longdouble(2)],
    "strings": (np.str_("ab"), np.bytes_(b"ab\0")),
    "times": {"day": np.datetime64("2020-01-02"), "span": np.timedelta64(7, "ns"), "none": np.datetime64("NaT", "25s")},
    "arrays": [np.arange(6, dtype=">i2").reshape(2, 3), np.asfortranarray(np.random.rand(2, 3)), np.ones(0)],
    "scalar": np.array(5),
    "text": np.array(["a", "bcd"]),
    "structure": np.zeros(2, np.dtype([("a", "<f4"), ("b", [("c", "i1", (2,))])], align=True)),
    "random": np.random.get_state(),
    "dtypes": OrderedDict(one=np.dtype("<f4"), two=np.dtype([("a", "i1")])),
    "tensor": torch.ones(2),
    "others": [io.BytesIO(b"state"), b"", pathlib.Path("a"), datetime.timedelta(1), Decimal("2.50")],
}


def test_numpy_in_torchs_files_comes_in_bit_by_bit(tmp_path: Path) -> None:
    torch.save(NUMPY, tmp_path / "x.pt")
    found = imported(tmp_path / "x.pt", tmp_path / "c")
    assert {key: same(found[key], value) for key, value in NUMPY.items()} == dict.fromkeys(NUMPY, True)


def test_numpy_1_names_its_functions_otherwise(tmp_path: Path) -> None:
    torch.save(NUMPY, tmp_path / "2.pt")
    with zipfile.ZipFile(tmp_path / "2.pt") as two, zipfile.ZipFile(tmp_path / "1.pt", "w") as one:
        for entry in two.infolist():
            one.writestr(entry.filename, two.read(entry).replace(b"cnumpy._core.", b"cnumpy.core."))
    assert same(imported(tmp_path / "1.pt", tmp_path / "c"), NUMPY)


def test_arrays_of_objects_are_refused_and_no_function_of_numpy_is_called(tmp_path: Path) -> None:
    for value in (np.array([1, None]), {"a": np.array([{}], dtype=object)}):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises((UsageError, CorruptCheckpoint), match=r"x\.pt"):
            imported(tmp_path / "x.pt", tmp_path / "c")
    allowed = [function for function, _ in STAND_INS]  # type: ignore[misc]
    assert all(function.__module__ == numpy_pickles.__name__ for function in allowed)


def test_values_that_other_formats_lack_are_converted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "w": torch.ones(2), "deque": deque([torch.zeros(1), 2]), "default": defaultdict(list, a=[1]),
        "path": pathlib.PurePosixPath("a/b"), "stream": io.BytesIO(b"x"), "day": datetime.date(2020, 1, 2),
        "number": Decimal("1.5"),
    }  # fmt: skip
    Checkpointer(tmp_path / "c").save(1, state).wait(timeout_s=60)
    for target in ("x.pt", "dcp", "x.safetensors"):
        assert ckpt.main(["export", str(tmp_path / "c"), str(tmp_path / target)]) == 0
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert (found["path"], found["stream"], found["day"], found["number"]) == ("a/b", b"x", "2020-01-02", "1.5")
    assert (type(found["deque"]), type(found["default"])) == (list, dict)
    assert "deques made lists: 1" in capsys.readouterr().out
    for target in ("dcp", "x.safetensors"):
        assert same(imported(tmp_path / target, tmp_path / f"from-{target}"), state)
