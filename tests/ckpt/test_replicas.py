"""layout=REPLICATED where the ranks differ: each gets back its own, and it is said once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from resilio_hpc.ckpt import REPLICATED, Slab
from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import Commit, Committed, Persist, Persisted, SaverFailed
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.ckpt.store import checkpoint_index, verify
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from resilio_hpc.core.errors import LayoutMismatch
from tests.ckpt.test_slabs import rank, save

RANKS = 3


def state(number: int, step: int = 0) -> dict[str, Any]:
    """Alike but for ``moment`` of rank 2 and the statistics of a batch norm."""
    norm = torch.nn.BatchNorm1d(4)
    norm.running_mean.fill_(number)  # type: ignore[union-attr, operator]
    return {
        "weight": torch.full((400_000,), 7.0 + step),
        "moment": np.full(300_000, 5.0 + (number == 2)),
        "norm": norm,
        "rank": number,
    }


def check(directory: Path, world: int, step: int = 0) -> None:
    for number in range(world):
        target = state(-1)
        target["moment"][:] = -1
        assert rank(directory, number, world, layout=REPLICATED).restore(target) is not None
        origin = number % RANKS
        assert (target["weight"] == 7.0 + step).all()
        assert (target["moment"] == 5.0 + (origin == 2)).all()
        assert (target["norm"].running_mean == origin).all()
        assert target["rank"] == origin


@pytest.mark.parametrize("local", [False, True])
def test_each_rank_gets_back_its_own_and_what_is_alike_is_stored_once(
    local: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "steps"
    options: dict[str, Any] = {"layout": REPLICATED, **({"local": tmp_path / "disk"} if local else {})}
    save(directory, [state(number) for number in range(RANKS)], **options)
    check(directory, RANKS)
    check(directory, RANKS + 2)
    step = checkpoint_index.step_directory(directory, 1)
    assert (step / "node-1.h5").stat().st_size < 100_000
    assert 2_400_000 < (step / "node-2.h5").stat().st_size < 2_500_000
    (manifest,) = checkpoint_index.committed(directory)
    assert verify.verify_step(directory, manifest) == []
    said = capfd.readouterr().err
    assert said.count("REPLICATED") == 2  # in one line
    assert "layout=REPLICATED, but moment of rank 2 differs from that of rank 0: each rank's own is saved" in said


def test_batch_statistics_alone_are_not_worth_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    states = [state(number) for number in range(RANKS)]
    for one in states:
        one["moment"][:] = 5
    for step in (1, 2):
        save(tmp_path, states, step, layout=REPLICATED)
    assert "REPLICATED" not in capfd.readouterr().err
    assert resilio_ckpt(["export", str(tmp_path), str(tmp_path / "whole.pt")]) == 0
    assert torch.load(tmp_path / "whole.pt")["norm"]["running_mean"].tolist() == [0.0] * 4
    part = torch.full((2,), -1.0)
    rank(tmp_path, 1, 2, layout=REPLICATED).restore({"norm": {"running_mean": Slab(part, (4,), (2,))}})
    assert part.tolist() == [0.0, 0.0]


def test_of_different_tensors_there_is_no_whole_one_to_take_a_part_of(tmp_path: Path) -> None:
    save(tmp_path, [state(number) for number in range(RANKS)], layout=REPLICATED)
    half = np.zeros(150_000)
    with pytest.raises(LayoutMismatch, match="the ranks saved different tensors as moment in layout REPLICATED"):
        rank(tmp_path, 0, 2, layout=REPLICATED).restore({"moment": Slab(half, (300_000,), (0,))})
    with pytest.raises(LayoutMismatch, match="different tensors at moment; --rank R"):
        resilio_ckpt(["export", str(tmp_path), str(tmp_path / "whole.pt")])
    assert resilio_ckpt(["export", str(tmp_path), str(tmp_path / "rank2.pt"), "--rank", "2"]) == 0
    assert torch.load(tmp_path / "rank2.pt", weights_only=False)["moment"][0] == 6.0


def test_a_tensor_that_rank_0_does_not_have_or_has_in_another_shape_is_the_ranks_own(tmp_path: Path) -> None:
    states = [{"x": np.zeros(3)}, {"x": np.ones(4), "more": np.ones(2)}]
    save(tmp_path, states, layout=REPLICATED)
    for number, expected in enumerate(states):
        found = rank(tmp_path, number, 2, layout=REPLICATED).restore()
        assert found is not None
        assert {name: value.tolist() for name, value in found[1].items()} == {
            name: value.tolist() for name, value in expected.items()
        }


def test_savers_of_two_nodes_compare_by_way_of_the_staging_directory(tmp_path: Path) -> None:
    """As agents ask them: the second node's saver may come first, and does not wait for ever."""
    paths = []
    for number in range(2):
        (tmp_path / f"arenas{number}").mkdir()
        owner = Owner(number, 0, 2, 1, 1, "replicated", "run")
        arenas = ArenaPair(tmp_path / f"arenas{number}", owner, tmp_path)
        with ThreadPoolExecutor(1) as pool:
            state = flatten({"x": np.ones(100_000), "y": np.full(9, number)})
            paths.append(Snapshot(arenas, 5, state, pool).finish()[0])
        arenas.close()
    requests = [Persist(5, 1, 1, 2, node, [str(path)], str(tmp_path / "steps")) for node, path in enumerate(paths)]
    failed = saver.serve(msgspec.structs.replace(requests[1], rank_0_s=0.1))
    assert isinstance(failed, SaverFailed)
    assert failed.error == "CheckpointError: rank 0 has not given its checksums within 0.1 s"
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(saver.serve, requests[1])
        first = threads.submit(saver.serve, requests[0])
    records = [answer.record for done in (first, second) if isinstance(answer := done.result(), Persisted)]
    committed = saver.serve(Commit(5, 1, 1, 2, str(tmp_path / "steps"), records))
    assert isinstance(committed, Committed)
    assert committed.differs == "y of rank 1"
    for number in range(2):
        found = rank(tmp_path / "steps", number, 2, layout=REPLICATED).restore()
        assert found is not None
        assert found[1]["y"].tolist() == [number] * 9
