"""Steps exported: the parts of all processes become whole; what goes wrong is said, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from resilio_hpc.ckpt import REPLICATED, Slab
from resilio_hpc.ckpt.convert.export import Format, export_step
from resilio_hpc.ckpt.convert.whole_state import WholeState
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, LayoutMismatch, UsageError
from tests.support.ckpt.foreign_formats import ALL, TARGETS, export, load, nothing_but, same, save
from tests.support.ckpt.unchecked_step import save_unchecked
from tests.support.mounts import mounted

pytest.importorskip("safetensors.torch")


def quarters(whole: torch.Tensor) -> list[Slab]:
    """Parts of a 2x2 grid, cut unevenly."""
    rows, columns = whole.shape[0] // 3, whole.shape[1] // 2 + 1
    cuts = [(slice(0, rows), slice(0, columns)), (slice(0, rows), slice(columns, None)),
            (slice(rows, None), slice(0, columns)), (slice(rows, None), slice(columns, None))]  # fmt: skip
    starts = [(0, 0), (0, columns), (rows, 0), (rows, columns)]
    return [Slab(whole[cut].clone(), tuple(whole.shape), start) for cut, start in zip(cuts, starts, strict=True)]


@ALL
def test_parts_of_many_processes_become_whole(form: Format, tmp_path: Path) -> None:
    big, small = torch.rand(7000, 3001), torch.rand(3, 5).to(torch.float8_e5m2)
    same_everywhere = torch.rand(4)
    states = [
        {"big": one, "small": other, "step": same_everywhere, "rank": number,
         f"only {number}": Slab(big[:1, :2], (1, 2), (0, 0))}
        for number, (one, other) in enumerate(zip(quarters(big), quarters(small), strict=True))
    ]  # fmt: skip
    states[2]["behind"] = torch.ones(2)  # not a slab, and with one process alone
    save(tmp_path / "c", states)
    target, _ = export(tmp_path / "c", form)
    like = {"big": big, "small": small, "step": same_everywhere, "behind": torch.ones(2)}
    like |= {f"only {number}": big[:1, :2] for number in range(4)}
    found = load(target, form, like)
    assert set(found) == set(like)
    assert [name for name in like if not same(found[name], like[name])] == []
    if form == "torch":
        assert torch.load(target, weights_only=True)["rank"] == 0


@ALL
def test_replicated_tensors_are_taken_once(form: Format, tmp_path: Path) -> None:
    save(tmp_path / "c", [{"w": torch.ones(3), "rank": number} for number in range(3)], REPLICATED)
    target, _ = export(tmp_path / "c", form)
    assert same(load(target, form, {"w": torch.ones(3)})["w"], torch.ones(3))
    assert torch.load(export(tmp_path / "c", "torch", rank=2, name="r")[0], weights_only=True)["rank"] == 2


def test_tensors_that_differ_need_a_rank(tmp_path: Path) -> None:
    part = [Slab(torch.full((2,), float(number)), (4,), (2 * number,)) for number in (0, 1)]
    save(tmp_path / "c", [{"w": torch.full((3,), number), "part": part[number]} for number in (0, 1)])
    with pytest.raises(LayoutMismatch, match=r"different tensors at w; --rank R exports"):
        export(tmp_path / "c", "torch")
    assert nothing_but(tmp_path, "c")
    found = torch.load(export(tmp_path / "c", "torch", rank=1)[0], weights_only=True)
    assert (found["w"].tolist(), found["part"].tolist()) == ([1, 1, 1], [1.0, 1.0])


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([{"a": torch.ones(2)}, {"a": 5}], None),
        ([{"a": 5}, {"a": torch.ones(2)}], "some processes have a tensor there, and others have not"),
        ([{"l": [1]}, {"l": [1, torch.ones(2)]}], "some processes have a tensor there"),
        ([{"x": Slab(torch.ones(2), (4,), (0,))}, {}], "holds 2 of the 4 elements of x"),
        ([{"x": Slab(torch.ones(3), (4,), (0,))}, {"x": Slab(torch.ones(3), (4,), (1,))}], "overlap"),
    ],
)
def test_no_tensor_gets_lost(states: list[Any], said: str | None, tmp_path: Path) -> None:
    save_unchecked(tmp_path / "c", states)
    if said is None:
        assert torch.equal(torch.load(export(tmp_path / "c", "torch")[0], weights_only=True)["a"], torch.ones(2))
        return
    with pytest.raises((LayoutMismatch, CorruptCheckpoint), match=said):
        export(tmp_path / "c", "torch")


def test_tensors_tied_in_one_process_only_are_compared(tmp_path: Path) -> None:
    tied = torch.rand(3)
    save(tmp_path / "c", [{"a": tied, "b": tied}, {"b": tied.clone()}])
    assert same(torch.load(export(tmp_path / "c", "torch")[0], weights_only=True)["b"], tied)
    save(tmp_path / "d", [{"a": tied, "b": tied}, {"b": tied + 1}])
    with pytest.raises(LayoutMismatch, match=r"state\['b'\]: the processes saved different tensors; --rank"):
        export(tmp_path / "d", "torch", name="d.pt")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("at", [0, 70 << 20])
def test_a_bit_that_flipped_is_found_and_nothing_appears(form: Format, at: int, tmp_path: Path) -> None:
    save(tmp_path / "c", [{"first": torch.ones(3), "w": torch.zeros(80 << 20, dtype=torch.uint8)}])
    path = checkpoint_index.step_directory(tmp_path / "c", 1) / "node-0.h5"
    with h5py.File(path) as file:
        offset = file["rank0/w"].id.get_offset() + at
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\x10")
    with pytest.raises(CorruptCheckpoint, match="tensor w does not match its checksum at byte"):
        export(tmp_path / "c", form)
    assert nothing_but(tmp_path, "c")


@ALL
def test_an_interrupted_export_leaves_nothing(form: Format, tmp_path: Path) -> None:
    save(tmp_path / "c", [{"a": torch.ones(100), "b": torch.ones(100)}])

    def interrupt(size: int) -> None:
        raise KeyboardInterrupt

    with (
        WholeState(tmp_path / "c", checkpoint_index.manifest_of(tmp_path / "c", 1)) as whole,
        pytest.raises(KeyboardInterrupt),
    ):
        export_step(whole, tmp_path / "target", form, overwrite=False, progress=interrupt)
    assert nothing_but(tmp_path, "c")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "size=10m") as directory:
        yield directory


@ALL
@pytest.mark.parametrize("is_known", [True, False])
def test_a_full_disk_is_said_and_nothing_remains(
    form: Format, is_known: bool, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", [{str(number): torch.ones(1 << 20) for number in range(4)}])
    if not is_known:  # as when somebody else fills it meanwhile
        monkeypatch.setattr("resilio_hpc.ckpt.store.backend.Store.check_space", lambda *_: None)
    with pytest.raises((OSError, CheckpointError), match=r"(?i)no space left|enforce fail|failed writing|write"):
        export(tmp_path / "c", form, name=f"small/{TARGETS[form]}")
    assert nothing_but(small_disk)


@ALL
def test_what_exists_is_replaced_when_asked_for_and_whole(form: Format, tmp_path: Path) -> None:
    save(tmp_path / "c", [{"w": torch.ones(3)}])
    target, _ = export(tmp_path / "c", form)
    with pytest.raises(UsageError, match="exists; remove it, or say --overwrite"):
        export(tmp_path / "c", form)
    save(tmp_path / "d", [{"w": torch.zeros(3)}])
    with WholeState(tmp_path / "d", checkpoint_index.manifest_of(tmp_path / "d", 1)) as whole:
        export_step(whole, target, form, overwrite=True)
    assert same(load(target, form, {"w": torch.ones(3)})["w"], torch.zeros(3))
    assert nothing_but(tmp_path, "c", "d", target.name)


def test_no_folder_is_replaced_that_is_not_of_its_kind(tmp_path: Path) -> None:
    save(tmp_path / "c", [{"w": torch.ones(3)}])
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with WholeState(tmp_path / "c", checkpoint_index.manifest_of(tmp_path / "c", 1)) as whole:
        for form, said in (("dcp", "is not a DCP folder"), ("torch", "is a directory")):
            with pytest.raises(UsageError, match=said):
                export_step(whole, tmp_path / "home", form, overwrite=True)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="make it first"):
            export_step(whole, tmp_path / "nowhere" / "x.pt", "torch", overwrite=True)
    assert nothing_but(tmp_path / "home", "thesis.tex")
