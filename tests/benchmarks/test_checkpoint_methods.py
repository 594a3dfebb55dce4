"""Every way to save loads what it saved, alone and in a training loop; one that does not is found out."""

import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_training
from checkpoint import NAMES, one_round
from checkpoint_measure import TENSORS, differing, fingerprint, measure
from checkpoint_methods import METHODS, Method, Place, TorchSave
from checkpoint_peers import PEERS
from checkpoint_processes import python_of

MODULES = {
    "nvrx fork": "nvidia_resiliency_ext",
    "nvrx worker": "nvidia_resiliency_ext",
    "torchsnapshot": "torchsnapshot",
    "dlrover flash": "dlrover",
}
PAIRS, STEPS = 2, 2
QUICK = ("limit", "ours", "safetensors")


def skip_if_missing(name: str) -> None:
    if name in PEERS:
        python = python_of(name)
        found = python.exists() and subprocess.run([python, "-c", f"import {MODULES[name]}"], capture_output=True)
        if not found or found.returncode != 0:
            pytest.skip("this peer is not installed here (benchmarks/peers_setup.sh)")


def options(directory: Path, processes: int = 1) -> Namespace:
    return Namespace(megabytes=4, saves=3, processes=processes, directory=directory, warm=True)


def marked(names: tuple[str, ...], *quick: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def test_every_peer_has_its_module_here() -> None:
    assert set(MODULES) == set(PEERS)


@pytest.mark.parametrize("name", marked(NAMES, *QUICK))
def test_a_method_measures_everything_and_loads_what_it_saved(name: str, tmp_path: Path) -> None:
    skip_if_missing(name)
    found = one_round(name, options(tmp_path))
    assert isinstance(found, dict), found
    counts = {figure: len(values) for figure, values in found.items()}
    memory = 3 if (METHODS | PEERS)[name].load_memory is not None else 0
    assert counts == {
        **{"first": 1, "blocked": 2, "effective": 2, "durable": 2, "cold": 2, "memory": memory},
        "wrong": 2 if memory else 1,
    }
    assert all(value > 0 for figure, values in found.items() for value in values if figure != "wrong")
    if name != "nvrx worker":  # it writes live tensors of a CPU
        assert set(found["wrong"]) == {0}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_save_and_load_their_parts(name: str, tmp_path: Path) -> None:
    skip_if_missing(name)
    found = one_round(name, options(tmp_path, processes=2))
    assert isinstance(found, dict), found
    if name != "nvrx worker":
        assert set(found["wrong"]) == {0}


def test_a_peer_without_its_environment_is_left_out_with_the_reason(tmp_path: Path) -> None:
    assert one_round("torchsnapshot", options(tmp_path), tmp_path / "none") == (
        "not installed here (benchmarks/peers_setup.sh installs the peers)"
    )


class Late(TorchSave):
    """Writes what the tensors have become by then."""

    def save(self, step: int) -> Callable[[], None]:
        return lambda: TorchSave.save(self, step)()


class Forgetful(TorchSave):
    """Loads nothing."""

    def load(self) -> None:
        return None


@pytest.mark.parametrize(("kind", "wrong"), [(TorchSave, 0), (Late, 3), (Forgetful, 3)])
def test_a_method_that_does_not_bring_back_what_was_saved_is_found_out(
    kind: type[Method], wrong: int, tmp_path: Path
) -> None:
    state = {str(number): torch.rand(1000) for number in range(3)}
    found = measure(kind(tmp_path, state, Place()), 2, lambda: None, cold=False)
    assert found["wrong"] == [wrong]


def test_one_changed_value_of_one_tensor_is_seen() -> None:
    state = {str(number): torch.rand(1000) for number in range(TENSORS)}
    saved = fingerprint(state)
    assert differing(saved, fingerprint(state)) == 0
    state["7"][999] += 1e-6
    assert differing(saved, fingerprint(state)) == 1
    del state["8"]
    assert differing(saved, fingerprint(state)) == 2


def test_values_at_other_places_are_seen() -> None:
    state = {"a": torch.rand(1000)}
    saved = fingerprint(state)
    state["a"].copy_(state["a"].flip(0))
    assert differing(saved, fingerprint(state)) == 1


def measured(name: str, directory: Path, processes: int) -> dict[str, object]:
    amounts = {"megabytes": 13 * processes, "pairs": PAIRS, "steps": STEPS, "batch": 8}
    options = Namespace(**amounts, processes=processes, threads=1, directory=directory)
    found = checkpoint_training.one_run(name, options)
    assert isinstance(found, dict), found
    assert list(directory.iterdir()) == []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", checkpoint_training.NAMES)
def test_blocks_with_and_without_saves_are_timed(name: str, tmp_path: Path) -> None:
    skip_if_missing(name)
    found = measured(name, tmp_path, 1)
    counts = {key: len(values) for key, values in found.items() if isinstance(values, list) and key != "fence"}
    draining = PAIRS * (STEPS - 1)
    plain = PAIRS * STEPS  # a step before the first save of a block counts for neither
    assert counts == {
        **{"with": PAIRS, "without": PAIRS, "plain": plain, "draining": draining},
        **{"durable": PAIRS, "first": 1},
    }
    if name != "nvrx worker":
        assert found["wrong"] == 0
    twice = checkpoint_training.together([found, found])
    assert len(twice["with"]) == 2 * PAIRS
    assert len(checkpoint_training.row(name, twice)) == len(checkpoint_training.COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", checkpoint_training.NAMES)
def test_two_processes_train_with_their_parts(name: str, tmp_path: Path) -> None:
    skip_if_missing(name)
    found = measured(name, tmp_path, 2)
    if name != "nvrx worker":
        assert found["wrong"] == 0
