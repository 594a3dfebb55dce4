"""Every kind of store does what the interface says, and all that reads and writes checkpoints goes through it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from resilio_hpc.ckpt.dcp import ResilioReader, ResilioWriter
from resilio_hpc.ckpt.saver.messages import Committed
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.backend import EntryKind
from resilio_hpc.ckpt.store.verify import verify_step
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.core.regular_file import NotRegular
from tests.support.ckpt.memory_store import MemoryStore, Tree
from tests.support.ckpt.stores import KINDS, WORLD, Place, part_of, place_in


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """An empty directory of checkpoints."""
    with place_in(request.param, tmp_path / "store", tmp_path) as found:
        found.take_over(1)
        yield found


def test_files_appear_whole_or_not_at_all(place: Place) -> None:
    store, path = place.store, place.directory / "file"
    assert store.look(path) is None
    with pytest.raises(FileNotFoundError):
        store.read(path)
    with pytest.raises(ZeroDivisionError), store.new_file(path) as file:
        file.write_small(memoryview(b"half"), 0)
        raise ZeroDivisionError
    assert store.names(place.directory) == ["epoch-fence"]
    store.write(path, b"one")
    store.write(path, b"other")
    assert store.read(path) == b"other"
    assert store.read(path, 2) == b"ot"
    assert not store.create(path, b"a third")
    assert store.create(path.with_name("new"), b"content")
    assert sorted(store.names(place.directory)) == ["epoch-fence", "file", "new"]
    assert store.size_of(path) == 5
    assert store.size_of(place.directory) == store.size_of(path.with_name("none")) == -1
    store.remove(path)
    store.remove(path, ignore_errors=False)
    assert not store.exists(path)


def test_a_file_is_read_where_it_is_asked_for(place: Place) -> None:
    store, path = place.store, place.directory / "file"
    content = bytes(range(256)) * 40
    with store.new_file(path) as file:
        assert not file.is_recycled
        file.allocate(len(content))
        file.write_small(memoryview(content), 0)
        assert file.pread(3, 2) == content[2:5]
    read = store.open(path)
    try:
        assert read.size_bytes == len(content)
        assert read.pread(10, 100) == content[100:110]
        assert read.pread(100, len(content) - 7) == content[-7:]
        assert read.pread(1, len(content)) == b""
        same = store.open(path)
        assert same.identity == read.identity
        same.close()
    finally:
        read.close()


def test_directories_are_made_listed_and_moved(place: Place) -> None:
    store, path = place.store, place.directory / "some" / "where"
    with pytest.raises(FileNotFoundError):
        store.names(path)
    store.make_directory(path)
    store.make_directory(path)
    with pytest.raises(FileExistsError):
        store.make_new_directory(path)
    assert store.is_directory(path)
    found = store.look(path)
    assert found is not None
    assert found.kind is EntryKind.DIRECTORY
    with pytest.raises(NotRegular):
        store.read(path)
    store.write(path / "file", b"x")
    with pytest.raises(NotADirectoryError):
        store.names(path / "file")
    step = place.directory / "step-0000000007"
    store.make_new_directory(step)
    gone = store.move_away(step, "removed")
    assert not store.exists(step)
    assert store.is_moved_away(gone.name)
    assert not any(map(store.is_moved_away, ["step-0000000007", "latest", "epoch-fence", "some"]))
    store.move_away(step, "removed")  # nothing is there any more
    store.remove(place.directory / "some")
    assert not store.exists(path)


def test_a_commit_leaves_the_former_step_or_takes_its_place(place: Place) -> None:
    store, staging, final = place.store, place.directory / ".staging-step-0000000001-e1-r0", place.directory / "step"
    for content in (b"one", b"other"):
        store.make_new_directory(staging)
        store.write(staging / "file", content)
        store.put_in_place(staging, final, lambda former: None)
        assert store.read(final / "file") == content
        assert not store.exists(staging)
    store.make_new_directory(staging)
    store.write(staging / "file", b"a third")

    def stays(former: Path) -> None:
        assert store.read(former / "file") == b"other"
        raise CheckpointError("it stays")

    with pytest.raises(CheckpointError, match="it stays"):
        store.put_in_place(staging, final, stays)
    assert store.read(final / "file") == b"other"


def test_a_full_store_is_told_before_it_is_written_to(place: Place) -> None:
    place.store.check_space(place.directory, 1 << 20)
    with pytest.raises(OSError, match="no space left for"):
        place.store.check_space(place.directory, 1 << 60)
    tree = Tree(Path("/small"), 3 << 20)
    small = MemoryStore(tree)
    small.write(tree.root / "former", b"x" * (1 << 20))
    with pytest.raises(OSError, match="no space left for"):
        small.check_space(tree.root, 3 << 19)
    small.check_space(tree.root, 3 << 19, tree.root / "former")
    with pytest.raises(OSError, match="No space left on device"):
        small.write(tree.root / "file", b"x" * (3 << 20))
    assert small.names(tree.root) == ["former"]
    tree.close()


def test_a_client_that_lists_what_was_sees_whole_steps_and_later_the_others(tmp_path: Path) -> None:
    with place_in("memory", tmp_path, tmp_path) as place:
        assert isinstance(place.store, MemoryStore)
        late = Place(place.directory, MemoryStore(place.store.tree, lists_stale=True), tmp_path)
        place.take_over(1)
        place.save(1, keep_last=2)
        assert late.store.names(place.directory) == place.store.names(place.directory)
        place.save(2, keep_last=1)
        assert "step-0000000002" not in late.store.names(place.directory)
        assert "step-0000000001" in late.store.names(place.directory)
        late.store.refresh(place.directory)
        assert sorted(late.store.names(place.directory)) == ["epoch-fence", "latest", "step-0000000002"]


def test_torch_saves_and_loads_in_any_store(place: Place) -> None:
    directory = place.directory.with_name("of-torch")
    state = {"w": torch.arange(12_000.0).reshape(100, 120), "n": {"step": 7, "name": "x"}}
    dcp.save(state, storage_writer=ResilioWriter(directory, 3))
    found = {"w": torch.zeros(100, 120), "n": {"step": 0, "name": ""}}
    dcp.load(found, storage_reader=ResilioReader(directory))
    assert torch.equal(found["w"], state["w"])
    assert found["n"] == state["n"]


def test_the_command_looks_at_and_changes_any_store(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        assert isinstance(place.save(step, keep_last=9), Committed)

    def said(*argv: str, code: int = 0) -> str:
        assert resilio_ckpt(list(argv)) == code
        return capsys.readouterr().out

    here, copy = str(place.directory), tmp_path / "copy"
    assert [one["step"] for one in json.loads(said("ls", here, "--json"))["steps"]] == [1, 2, 3]
    said("verify", here)
    assert "checkpoint.h5 shows it" in said("show", here, "--h5")
    assert "1500" in said("show", here)
    assert place.store.size_of(checkpoint_index.step_directory(place.directory, 3) / "checkpoint.h5") > 0
    said("verify", here)
    said("copy", here, str(copy), "2")
    assert checkpoint_index.committed_steps(copy) == [2]
    said("copy", str(copy), str(place.directory.with_name("back")), "2")
    assert checkpoint_index.committed_steps(place.directory.with_name("back")) == [2]
    said("diff", here, "2", "3", code=1)
    said("prune", here, "--keep-checkpoints", "1")
    assert place.steps() == [3]
    assert place.restored() == 3
    said("export", here, str(tmp_path / "state.safetensors"), "--format", "safetensors")
    whole = load_file(tmp_path / "state.safetensors")["x"]
    assert np.array_equal(whole, np.concatenate([part_of(3, rank) for rank in range(WORLD)]))


@pytest.mark.parametrize("kind", ["file system", "memory"])
def test_any_harm_to_any_file_is_found_or_does_not_matter(kind: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(data=st.data())
    def harmed(data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as name, place_in(kind, Path(name), Path(name)) as place:
            place.take_over(1)
            place.save(1, keep_last=2)
            place.save(2, keep_last=2)
            step = checkpoint_index.step_directory(place.directory, 2)
            path = step / data.draw(st.sampled_from(sorted(place.store.names(step))))
            place.store.write(path, data.draw(st.sampled_from(HARMS))(data, place.store.read(path)))
            _check(place)

    harmed()


def _check(place: Place) -> None:
    """What is restored is right, and what is not right is found."""
    steps = checkpoint_index.committed_steps(place.directory)
    assert steps in ([1], [1, 2])
    damages = [verify_step(place.directory, manifest) for manifest in checkpoint_index.committed(place.directory)]
    assert damages[0] == []
    is_good = steps == [1, 2] and not any(damages)
    assert place.restored() in ([2] if is_good else [1, 2])


def _flipped(data: st.DataObject, content: bytes) -> bytes:
    at = data.draw(st.integers(0, len(content) - 1))
    return content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]


def _cut(data: st.DataObject, content: bytes) -> bytes:
    return content[: data.draw(st.integers(0, len(content) - 1))]


def _longer(data: st.DataObject, content: bytes) -> bytes:
    return content + data.draw(st.binary(min_size=1, max_size=9))


HARMS: list[Callable[[st.DataObject, bytes], bytes]] = [_flipped, _cut, _longer]
