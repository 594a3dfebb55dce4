"""Steps made of other programs' files: any number of processes restore them bit by bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from resilio_hpc.ckpt import REPLICATED, Slab, rng_state
from resilio_hpc.ckpt.convert.export import Format, format_of
from resilio_hpc.ckpt.convert.import_step import import_step, open_source
from resilio_hpc.ckpt.format.manifest import Layout
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.verify import verify_step
from resilio_hpc.core.errors import CheckpointError, UsageError
from resilio_hpc.core.process import run
from tests.support.ckpt.foreign_formats import ALL, TARGETS, export, flat, nothing_but, rank, same, save, trained
from tests.support.environments import SUPPORT
from tests.support.mounts import mounted

safetensors_torch = pytest.importorskip("safetensors.torch")


def import_(source: Path, directory: Path, layout: Layout = "replicated", step: int = 1) -> None:
    opened = open_source(source, format_of(source))
    heard: list[int] = []
    import_step(opened, directory, step, layout, heard.append)
    manifest = checkpoint_index.manifest_of(directory, step)
    assert sum(heard) == 2 * opened.size_bytes
    assert verify_step(directory, manifest) == []


def restored(directory: Path, state: Any = None, world: int = 1, number: int = 0, layout: Any = REPLICATED) -> Any:
    found = rank(directory, number, world, layout=layout).restore(state)
    assert found is not None
    return found[1]


def write(state: dict[str, Any], form: Format, target: Path) -> None:
    """As those write it whose format it is."""
    if form == "torch":
        torch.save(state, target)
    elif form == "safetensors":
        safetensors_torch.save_file(state, target)
    else:
        dcp.save(state, checkpoint_id=target, no_dist=True)


@ALL
def test_tensors_of_all_kinds_come_in_bit_by_bit(form: Format, tmp_path: Path) -> None:
    raw = torch.arange(48, dtype=torch.uint8) * 5
    state = {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "bool": raw % 2 == 1,
             "large": torch.arange(9 << 20, dtype=torch.int64).reshape(3, -1)}  # fmt: skip
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.float16, torch.uint64):
        state[str(dtype)] = raw.view(dtype).clone()
    if form != "safetensors":
        state["complex128"] = raw.view(torch.complex128).clone()
        state["strided"] = torch.arange(6 << 20, dtype=torch.int32).reshape(2048, -1).t()[::2]
        state["expanded"] = torch.rand(3, 1).expand(3, 4)
        state["parameter"] = torch.nn.Parameter(torch.ones(2))
    write(state, form, tmp_path / TARGETS[form])
    import_(tmp_path / TARGETS[form], tmp_path / "c")
    found = restored(tmp_path / "c")
    assert set(found) == set(state)
    assert [name for name in state if not same(found[name], state[name])] == []


@pytest.mark.parametrize("layout", ["replicated", "own"])
@ALL
def test_any_number_of_processes_restores_it(form: Format, layout: Layout, tmp_path: Path) -> None:
    whole, step = torch.rand(7, 5), torch.tensor(4.0)
    write({"w": whole, "step": step}, form, tmp_path / TARGETS[form])
    import_(tmp_path / TARGETS[form], tmp_path / "c", layout)
    chosen = REPLICATED if layout == "replicated" else None
    for world, number in ((1, 0), (3, 2)):
        plain = {"w": torch.zeros(7, 5), "step": torch.zeros(())}
        assert same(restored(tmp_path / "c", plain, world, number, chosen)["w"], whole)
        assert plain["step"] == 4
    part = {"w": Slab(torch.zeros(2, 5), (7, 5), (3, 0)), "step": torch.zeros(())}
    restored(tmp_path / "c", part, 3, 1, chosen)
    assert same(part["w"].tensor, whole[3:5])


def test_a_torch_file_restores_model_optimizer_and_plain_values(tmp_path: Path) -> None:
    parts, fresh = trained(), trained()
    weight = parts["model"][0].weight
    torch.save(
        {name: part.state_dict() for name, part in parts.items()} | {"n": (1, 2), "tied": weight}, tmp_path / "a.pt"
    )
    import_(tmp_path / "a.pt", tmp_path / "c")
    found = restored(tmp_path / "c", {**fresh, "n": None, "tied": torch.zeros(20, 30)})
    assert found["n"] == (1, 2)
    assert same(found["tied"], weight)
    for name, part in parts.items():
        for mine, theirs in zip(flat(fresh[name].state_dict()), flat(part.state_dict()), strict=True):
            assert mine[0] == theirs[0]
            assert same(mine[1], theirs[1])


@ALL
def test_what_we_exported_comes_back_as_it_was(form: Format, tmp_path: Path) -> None:
    parts, fresh = trained(), trained()
    plain = {"t": (1, torch.ones(2)), "e": {}, 5: [None, {}], "b": b"\0", "random": rng_state(), "big": 1 << 80}
    exact = {"numpy": np.arange(3.0), "frozen": frozenset({2}), "scalar": np.int8(3)} if form != "torch" else {}
    save(tmp_path / "c", [{**parts, "plain": plain, "tied": parts["model"][0].weight, **exact}])
    import_(export(tmp_path / "c", form)[0], tmp_path / "d")
    found = restored(tmp_path / "d", {**fresh, "plain": None, "tied": torch.zeros(20, 30), **dict.fromkeys(exact)})
    assert torch.equal(found["plain"].pop("t")[1], torch.ones(2))
    assert found["plain"] == {key: value for key, value in plain.items() if key != "t"}
    assert same(found["tied"], parts["model"][0].weight)
    if exact:
        assert isinstance(found["numpy"], np.ndarray)
        assert found["numpy"].tolist() == [0.0, 1.0, 2.0]
        assert (found["frozen"], type(found["scalar"]), int(found["scalar"])) == (frozenset({2}), np.int8, 3)
    for name, part in parts.items():
        for mine, theirs in zip(flat(fresh[name].state_dict()), flat(part.state_dict()), strict=True):
            assert same(mine[1], theirs[1])


def test_a_folder_of_a_python_that_pickles_members_by_getattr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 3.11.2 does."""
    encoding = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    dcp.save({"w": torch.arange(3.0)}, checkpoint_id=tmp_path / "f", no_dist=True)
    assert b"getattr" in (tmp_path / "f" / ".metadata").read_bytes()
    import_(tmp_path / "f", tmp_path / "d")
    assert restored(tmp_path / "d", {"w": torch.zeros(3)})["w"].tolist() == [0.0, 1.0, 2.0]


def test_a_dcp_folder_of_one_process_with_an_optimizer_by_numbers(tmp_path: Path) -> None:
    parts, fresh = trained(), trained()
    state = {name: part.state_dict() for name, part in parts.items()}
    write({**state, "l": [torch.ones(1), 2], "t": (1, torch.ones(2))}, "dcp", tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "c")
    found = restored(tmp_path / "c", {**fresh, "l": None, "t": None})
    assert (found["l"][1], found["t"][0], found["t"][1].tolist()) == (2, 1, [1.0, 1.0])
    for mine, theirs in zip(flat(fresh["optimizer"].state_dict()), flat(parts["optimizer"].state_dict()), strict=True):
        assert same(mine[1], theirs[1])


def test_empty_states_come_back_empty(tmp_path: Path) -> None:
    write({}, "dcp", tmp_path / "dcp")
    torch.save([], tmp_path / "a.pt")
    import_(tmp_path / "dcp", tmp_path / "c")
    import_(tmp_path / "a.pt", tmp_path / "c", step=2)
    assert [rank(tmp_path / "c", 0, 1, layout=REPLICATED).restore(step=step) for step in (1, 2)] == [(1, {}), (2, [])]


def test_a_dcp_folder_that_was_saved_into_again_is_taken_by_its_own_words(tmp_path: Path) -> None:
    save(tmp_path / "c", [{"a": torch.zeros(2)}])
    target, _ = export(tmp_path / "c", "dcp")
    write({"b": torch.ones(3)}, "dcp", target)
    import_(target, tmp_path / "d")
    assert list(restored(tmp_path / "d")) == ["b"]


@pytest.mark.slow
def test_the_parts_that_fsdp_saves_become_whole(tmp_path: Path) -> None:
    run([sys.executable, str(SUPPORT / "ckpt" / "dcp_of_two.py"), str(tmp_path)], 120)
    import_(tmp_path / "dcp", tmp_path / "c")
    import_(tmp_path / "whole.pt", tmp_path / "d")
    one, other = restored(tmp_path / "c"), restored(tmp_path / "d")
    assert (one.pop("epoch"), one.pop("rates")) == (3, [0.5, 0.25])
    mine, theirs = dict(flat(one)), dict(flat(other))
    assert set(mine) == set(theirs)
    assert len(mine) == 4 + 3 * 4
    assert [name for name in mine if not same(mine[name], theirs[name])] == []


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_step_that_exists_stays(tmp_path: Path) -> None:
    save(tmp_path / "c", [{"w": torch.ones(3)}])
    torch.save({"w": torch.zeros(3)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"step 1 is in .* already"):
        import_(tmp_path / "a.pt", tmp_path / "c")
    assert restored(tmp_path / "c", layout=None)["w"].tolist() == [1, 1, 1]


def test_a_run_that_goes_on_refuses_by_its_fence(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "epoch-fence").write_text("4\n")
    torch.save({"w": torch.zeros(3)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="epoch 0 may not commit any more: epoch 4 has taken over"):
        import_(tmp_path / "a.pt", tmp_path / "c")
    assert nothing_but(tmp_path / "c", "epoch-fence")


@ALL
def test_an_interrupted_import_leaves_nothing(form: Format, tmp_path: Path) -> None:
    write({"a": torch.ones(100)}, form, tmp_path / TARGETS[form])

    def interrupt(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_step(open_source(tmp_path / TARGETS[form], form), tmp_path / "c", 1, "own", interrupt)
    assert nothing_but(tmp_path / "c")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "size=10m") as directory:
        yield directory


@pytest.mark.parametrize("is_known", [True, False])
def test_a_full_disk_is_said_and_nothing_remains(
    is_known: bool, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(4 << 20)}, tmp_path / "a.pt")
    if not is_known:  # as when somebody else fills it meanwhile
        monkeypatch.setattr("resilio_hpc.ckpt.store.backend.Store.check_space", lambda *_: None)
    with pytest.raises(OSError, match=r"(?i)no space left"):
        import_(tmp_path / "a.pt", small_disk)
    assert nothing_but(small_disk)


def test_what_a_checkpoint_cannot_hold_is_named_by_its_place(tmp_path: Path) -> None:
    torch.save({"a": [torch.ones(2).to_sparse()]}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"state\['a'\]\[0\]: a tensor of kind torch.sparse_coo cannot be saved"):
        import_(tmp_path / "a.pt", tmp_path / "c")
    assert not (tmp_path / "c").exists()
