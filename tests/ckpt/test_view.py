"""checkpoint.h5: plain h5py sees the whole state in it, and no harm to it harms a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from resilio_hpc.ckpt import REPLICATED, Slab
from resilio_hpc.ckpt.store import checkpoint_index, verify
from resilio_hpc.ckpt.store.view import why_wrong, write_view
from resilio_hpc.cli.main import main
from resilio_hpc.core.errors import CheckpointError
from tests.ckpt.test_slabs import boxes, cut, rank, save
from tests.support.ckpt.unchecked_step import save_unchecked
from tests.support.requirements import need_extensions


def step_of(directory: Path, step: int = 1) -> Path:
    return checkpoint_index.step_directory(directory, step)


def viewed(directory: Path, step: int = 1, in_parts: tuple[str, ...] = ()) -> Path:
    """Make it; where it is."""
    manifest = checkpoint_index.manifest_of(directory, step)
    assert tuple(write_view(directory, manifest)) == in_parts
    assert verify.verify_step(directory, manifest) == []
    return step_of(directory, step) / "checkpoint.h5"


def names_in(path: Path) -> list[str]:
    """Every link to something that is no group."""
    found: list[str] = []
    with h5py.File(path) as file:
        file.visit_links(found.append)
        return sorted(name for name in found if not isinstance(file[name], h5py.Group))


@pytest.mark.parametrize(
    ("shape", "grid"), [((64, 48), (2, 2)), ((64, 48), (4, 1)), ((7, 5, 3), (2, 1, 3)), ((2, 9), (4, 1)), ((9,), (3,))]
)
def test_slabs_of_all_ranks_are_one_dataset(shape: tuple[int, ...], grid: tuple[int, ...], tmp_path: Path) -> None:
    whole = np.random.default_rng(1).random(shape)
    states = [
        {"model": {"x": Slab(cut(whole, box).copy(), shape, box.start)}, "rank": number, "own": np.full(3, number)}
        for number, box in enumerate(boxes(shape, grid))
    ]
    save(tmp_path, states)
    with h5py.File(viewed(tmp_path)) as file:
        assert file["whole/model/x"].is_virtual
        assert file["whole/model/x"].dtype == whole.dtype
        assert np.array_equal(file["whole/model/x"][...], whole)
        for number in range(len(states)):
            assert json.loads(file[f"rank{number}/$tree"][()])["rank"] == number
            assert file[f"rank{number}/own"][...].tolist() == [number] * 3
        about = [file.attrs[name] for name in ("format", "version", "step", "world_size", "layout")]
        assert about == ["resilio-checkpoint", 2, 1, len(states), "own"]
        assert "reads NaN, or 0" in file.attrs["note"]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn, torch.complex64, torch.complex32,
        torch.bool, torch.int8, torch.uint16,
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(6, 8), (6, 0), ()])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_is_shown_as_in_a_shard_file(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    """That of a process that has it whole."""
    size = int(np.prod(shape)) * dtype.itemsize
    whole = (torch.arange(size, dtype=torch.uint8) % (2 if dtype == torch.bool else 120)).view(dtype).reshape(shape)
    save(tmp_path / "one", [{"x": whole}])
    where = list(boxes(shape, (2, 2)[: len(shape)]))
    save(tmp_path / "many", [{"x": Slab(cut(whole, box).contiguous(), shape, box.start)} for box in where])
    with h5py.File(step_of(tmp_path / "one") / "node-0.h5") as one, h5py.File(viewed(tmp_path / "many")) as many:
        expected, found = one["rank0/x"], many["whole/x"]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.attrs.get("dtype") == expected.attrs.get("dtype")
        assert found.id.get_type().equal(expected.id.get_type())
        assert np.array_equal(found[...], expected[...], equal_nan=True) or not whole.is_floating_point()
        assert found[...].tobytes() == expected[...].tobytes()


def test_replicated_tensors_are_there_once_and_plain_values_of_every_rank(tmp_path: Path) -> None:
    state = {"w": torch.rand(4, 3), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 2)}
    save(tmp_path, [{**state, "rank": number} for number in range(3)], layout=REPLICATED)
    path = viewed(tmp_path)
    assert names_in(path) == [*(f"rank{number}/$tree" for number in range(3)), "whole/empty", "whole/scalar", "whole/w"]
    with h5py.File(path) as file:
        assert np.array_equal(file["whole/w"][...], state["w"].numpy())
        assert file["whole/scalar"][()] == 2.5
        assert file["whole/empty"].shape == (0, 2)


def test_tied_weights_are_there_under_all_their_names(tmp_path: Path) -> None:
    tied, own = torch.rand(4, 3), torch.rand(2)
    states = [
        {
            "embedding": {"weight": (part := Slab(tied[2 * n : 2 * n + 2].clone(), (4, 3), (2 * n, 0)))},
            "head": [part, {"again": own}],
            "own": own,
        }
        for n in (0, 1)
    ]
    save(tmp_path, states)
    with h5py.File(viewed(tmp_path)) as file:
        for name in ("whole/embedding/weight", "whole/head/0"):
            assert np.array_equal(file[name][...], tied.numpy())
        assert isinstance(file.get("whole/head/0", getlink=True), h5py.SoftLink)
        for name in ("rank0/own", "rank1/own", "rank1/head/1/again"):
            assert np.array_equal(file[name][...], own.numpy())


def test_what_does_not_make_one_tensor_is_shown_in_parts(tmp_path: Path) -> None:
    def part(value: float, rows: int, first: int, dtype: torch.dtype = torch.float32) -> Slab:
        return Slab(torch.full((2, 3), value, dtype=dtype), (rows, 3), (first, 0))

    states: list[dict[str, Any]] = [
        {"gap": part(1, 5, 0), "types": part(1, 4, 0), "twice": part(1, 4, 0), "overlap": part(1, 3, 0),
         "shapes": part(1, 4, 0), "a": part(1, 4, 0)},
        {"gap": part(2, 5, 3), "types": part(2, 4, 2, torch.int32), "twice": part(2, 4, 0), "overlap": part(2, 3, 1),
         "shapes": part(2, 5, 2), "a": part(2, 4, 2)},
        {"a": {"b": part(1, 2, 0)}},
    ]  # fmt: skip
    save_unchecked(tmp_path, states)
    path = viewed(tmp_path, in_parts=("gap", "types", "twice", "overlap", "shapes", "a/b"))
    with h5py.File(path) as file:
        assert list(file["whole"]) == ["a"]
        for name in ("gap", "types", "twice", "overlap", "shapes"):
            assert file[f"rank0/{name}"][0, 0] == 1
            assert file[f"rank1/{name}"][0, 0] == 2
        assert list(file["rank1/gap"].attrs["start"]) == [3, 0]
        assert file["rank2/a/b"][0, 0] == 1


def test_a_step_of_dcp_is_shown_too(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from resilio_hpc.ckpt.dcp.__init__ import ResilioWriter

    state = {"model": {"w": torch.rand(3, 2)}, "n": 7}
    dcp.save(state, storage_writer=ResilioWriter(tmp_path, 1), no_dist=True)
    with h5py.File(viewed(tmp_path)) as file:
        assert np.array_equal(file["whole/model/w"][...], state["model"]["w"].numpy())  # type: ignore[index]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Steps 1 and 2 of two processes, each with its view."""
    made = tmp_path / "check 'points"
    for step in (1, 2):
        parts = [torch.full((2, 3), 10.0 * step + n) for n in (0, 1)]
        save(made, [{"x": Slab(part, (4, 3), (2 * n, 0)), "n": n} for n, part in enumerate(parts)], step)
        viewed(made, step)
    return made


def read(path: Path) -> list[float]:
    with h5py.File(path) as file:
        return [float(value) for value in file["whole/x"][:, 0]]


def test_a_step_that_is_moved_or_copied_takes_its_view_along(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(step_of(directory, 1), tmp_path / "elsewhere")
    assert main(["ckpt", "copy", str(directory), str(tmp_path / "archive"), "2"]) == 0
    shutil.rmtree(directory)
    monkeypatch.chdir("/")
    assert read(tmp_path / "elsewhere" / "checkpoint.h5") == [10, 10, 11, 11]
    assert read(step_of(tmp_path / "archive", 2) / "checkpoint.h5") == [20, 20, 21, 21]
    assert main(["ckpt", "verify", str(tmp_path / "archive")]) == 0
    assert sorted(path.name for path in step_of(tmp_path / "archive", 2).iterdir()) == [
        "checkpoint.h5", "manifest.json", "node-0.h5", "node-1.h5",
    ]  # fmt: skip


def test_a_file_that_is_missing_is_seen_as_far_as_hdf5_lets_us(directory: Path) -> None:
    (step_of(directory) / "node-1.h5").unlink()
    assert np.isnan(read(step_of(directory) / "checkpoint.h5")).tolist() == [False, False, True, True]
    (damage,) = verify.verify_step(directory, checkpoint_index.manifest_of(directory, 1))
    assert damage.file == "node-1.h5"


def test_whatever_byte_of_it_changes_verify_says_so_and_the_step_is_as_good_as_before(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, manifest = step_of(directory, 2) / "checkpoint.h5", checkpoint_index.manifest_of(directory, 2)
    good = path.read_bytes()
    for at in (*range(0, 512, 7), *range(512, len(good), 97)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert why_wrong(path.parent, manifest)
    for content in (b"", good[:-1], good + b"x", (step_of(directory, 1) / "checkpoint.h5").read_bytes()):
        path.write_bytes(content)
        assert why_wrong(path.parent, manifest)
    assert main(["ckpt", "verify", str(directory)]) == 1
    said = capsys.readouterr().out
    assert "checkpoint.h5: it was made for another step" in said
    assert "a restore does not need it: make it anew with 'resilio ckpt show --h5', or remove it" in said
    assert checkpoint_index.noted_damage(directory, 2) == ""
    assert main(["ckpt", "copy", str(directory), str(directory.parent / "archive"), "2"]) == 1
    mine = torch.zeros(4, 3)
    assert rank(directory, 0, 1).restore({"x": mine, "n": 0})
    assert mine[:, 0].tolist() == [20, 20, 21, 21]
    assert main(["ckpt", "show", str(directory), "2", "--h5"]) == 0
    assert main(["ckpt", "verify", str(directory)]) == 0
    assert read(path) == [20, 20, 21, 21]


def test_one_of_a_step_that_was_saved_again_is_gone_with_it(directory: Path) -> None:
    parts = [torch.full((2, 3), 70.0 + n) for n in (0, 1)]
    save(directory, [{"x": Slab(part, (4, 3), (2 * n, 0)), "n": n} for n, part in enumerate(parts)], 2)
    assert not (step_of(directory, 2) / "checkpoint.h5").exists()


def test_a_link_in_its_place_is_read_and_what_it_leads_to_is_never_written(directory: Path) -> None:
    path, elsewhere = step_of(directory) / "checkpoint.h5", directory / "elsewhere"
    before = path.read_bytes()
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    manifest = checkpoint_index.manifest_of(directory, 1)
    assert why_wrong(path.parent, manifest) == ""
    elsewhere.write_bytes(before[:-1])
    assert "checksum" in why_wrong(path.parent, manifest)
    write_view(directory, manifest)
    assert (elsewhere.read_bytes(), path.is_symlink(), why_wrong(path.parent, manifest)) == (before[:-1], False, "")


def test_show_makes_it_and_says_how(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = step_of(directory, 2) / "checkpoint.h5"
    path.unlink()
    assert main(["ckpt", "show", str(directory)]) == 0
    assert capsys.readouterr().out.endswith(
        "(--h5 makes checkpoint.h5 in the step's directory: all ranks' tensors as one HDF5 file)\n"
    )
    assert main(["ckpt", "show", str(directory), "--h5"]) == 0
    assert capsys.readouterr().out == f"step 2: {path} shows it as one HDF5 file\n"
    assert main(["ckpt", "show", str(directory)]) == 0
    assert "--h5" not in capsys.readouterr().out
    assert main(["ckpt", "show", str(directory), "1", "--h5", "--json"]) == 0
    made = {"step": 1, "file": str(step_of(directory) / "checkpoint.h5"), "in_parts": []}
    assert json.loads(capsys.readouterr().out) == made
    assert main(["ckpt", "diff", str(directory), "1", "1"]) == 0
    assert main(["ckpt", "prune", str(directory), "--keep-checkpoints", "1"]) == 0
    assert sorted(found.name for found in directory.iterdir()) == ["latest", "step-0000000002"]


def test_what_the_disk_or_a_damaged_table_refuses_leaves_the_former_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = step_of(directory, 2) / "checkpoint.h5"
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert main(["ckpt", "show", str(directory), "--h5"]) == 1
    assert "step 2: [Errno 28] No space left on device" in capsys.readouterr().err
    shard = path.with_name("node-1.h5")
    shard.write_bytes(shard.read_bytes().replace(b'"tensors"', b'"tensorz"'))
    with pytest.raises(CheckpointError, match="the table of rank 1 does not match its checksum"):
        write_view(directory, checkpoint_index.manifest_of(directory, 2))
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 4


def test_nobody_who_saves_or_verifies_needs_h5py_for_it() -> None:
    need_extensions()  # without them numpy computes the checksums
    code = (
        "import sys, resilio_hpc.ckpt.saver.saver, resilio_hpc.ckpt.store.verify\n"
        "import resilio_hpc.launch.agent.agent, resilio_hpc.cli.ckpt.ckpt\n"
        "print([name for name in ('h5py', 'torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
