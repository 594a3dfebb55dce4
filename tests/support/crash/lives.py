"""Lives of a small training run, in forked children that may be harmed: it saves, and another life restores."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resilio_hpc import ckpt
from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
from resilio_hpc.ckpt.format.manifest import is_shard_name
from resilio_hpc.ckpt.store import checkpoint_index, shard_file
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.tiers import local_disk
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from resilio_hpc.core.errors import CheckpointError
from tests.support.crash.harm import Harm, arm

RETENTION = Retention(3)
PR_SET_CHILD_SUBREAPER = 36
LOADED = (shard_file,)
"""Imported before the children are forked: with it comes h5py."""


def state_of(step: int, rank: int = 0) -> dict[str, Any]:
    """More than a hundred pages and a rest that is none, a small tensor, an empty one, plain values."""
    return {
        "a": np.arange(70_000) * (step + 10 * rank),
        "b": [np.full(3, step), np.zeros((0, 2))],
        "step": step,
        "rank": rank,
    }


def is_state_of(found: Any, step: int, rank: int = 0) -> bool:
    """Is it, bit by bit?"""
    expected = state_of(step, rank)
    plain = (found["step"], found["rank"], len(found["b"])) == (step, rank, 2)
    pairs = [(found["a"], expected["a"]), *zip(found["b"], expected["b"], strict=True)]
    return plain and all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in pairs)


def fork(act: Callable[[], None]) -> int:
    """A child that ends with exit code 0, or with a traceback and 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        act()
        code = 0
    except BaseException:  # noqa: BLE001 - told, and in the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_of(child: int) -> int:
    """Its exit code, or -signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def copy_of(base: Path, target: Path) -> Path:
    """A fresh copy to be harmed."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    return target


def end_of_all() -> None:
    """Of all children, and of what those have left, if we adopt it."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def end_of_life(act: Callable[[], None]) -> int:
    """The exit code of a child that does ``act``, when the savers that it has left behind have ended, too."""

    def launcher() -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        code = end_of(fork(act))
        end_of_all()
        assert code == 0, code

    return end_of(fork(launcher))


def become(rank: int, world: int, directory: Path, own_process: bool = False, **options: Any) -> ckpt.Checkpointer:
    """This process is now that rank of a world on one node. ``own_process``: its saver gets one; else it is a thread,
    which takes no time to start."""
    if not own_process:
        sys.executable = "/nowhere/python"
    # a directory on a node's own disk is swept by a thread beside the first save, whose calls come at any time: where
    # one with that name lives, no other is started
    threading.Thread(target=threading.Event().wait, name=local_disk._SWEEPER, daemon=True).start()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    coordinator.use(LocalCoordinator(directory, os.environ, **{"retention": RETENTION, **options}))
    return ckpt.Checkpointer(directory)


def save(directory: Path, steps: Sequence[int], harms: Sequence[Harm | None], **options: Any) -> list[str]:
    """A life of one process for each of ``harms`` that saves ``steps``; ``options``: of LocalCoordinator.

    How each has ended, its saver too: "committed", "killed", or what the handle of the last step said. Where it made
    fewer calls than it takes until the harm, their number, too.
    """
    told = [directory.with_name(f"{directory.name}-told-{rank}") for rank in range(len(harms))]
    for path in told:
        path.unlink(missing_ok=True)

    def rank_of(rank: int, harm: Harm | None) -> None:
        checkpointer = become(rank, len(harms), directory, **options)
        if harm is not None:
            arm(harm, directory, *([options["local"]] if "local" in options else []))
        said = "committed"
        for step in steps:
            handle = checkpointer.save(step, state_of(step, rank))
            try:
                handle.wait(timeout_s=100)
            except CheckpointError as error:
                said = str(error)
        calls = arm(Harm("off"))
        if harm is not None and harm.mode in ("kill", "tear") and calls < harm.at:
            said = f"{said} after {calls} calls"
        told[rank].write_text(said)

    def launcher() -> None:
        """Ranks of one life have the same parent, which is another one than that of the next life."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ranks = [fork(lambda rank=rank, harm=harm: rank_of(rank, harm)) for rank, harm in enumerate(harms)]
        for rank, child in enumerate(ranks):
            if (code := end_of(child)) == -9:
                told[rank].write_text("killed")
            elif code:
                told[rank].write_text(f"exit code {code}")
        end_of_all()

    assert end_of(fork(launcher)) == 0
    return [path.read_text() for path in told]


def check(directory: Path, allowed: Sequence[int], world: int = 1, **options: Any) -> int:
    """A new life restores one of ``allowed`` (0: nothing), whole and right, and all that looks agrees. The step."""
    result = directory.with_name(f"{directory.name}-restored")

    def restored(rank: int) -> None:
        checkpointer = become(rank, world, directory, **options)
        found = checkpointer.restore()
        if found is None:
            assert 0 in allowed, "nothing was found"
            result.write_text("0")
            return
        step, state = found
        assert is_state_of(state, step, rank), f"the content of step {step} is wrong"
        assert step in allowed, f"step {step} was restored, not one of {allowed}"
        if rank:
            assert json.loads(result.read_text()) == step, "the ranks restored different steps"
            return
        assert checkpoint_index.committed_steps(directory)[-1] == step
        assert checkpoint_index.damaged_steps(directory) == {}
        assert resilio_ckpt(["verify", "--json", str(directory)]) == 0
        result.write_text(json.dumps(step))

    quiet = os.dup(1)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
    try:
        for rank in range(world):
            assert end_of(fork(lambda rank=rank: restored(rank))) == 0, "a new life could not restore"
    finally:
        os.dup2(quiet, 1)
        os.close(quiet)
    return int(json.loads(result.read_text()))


def check_disk(disk: Path, *allowed: Sequence[int]) -> None:
    """On the node's own disk are copies of steps, as one of ``allowed`` says, and nothing else."""
    (held,) = disk.iterdir()
    names = sorted(str(path.relative_to(held)) for path in held.rglob("*") if path.is_file())
    assert names in [["held", *(f"step-{step:010d}-e0-r0/node-0.h5" for step in steps)] for steps in allowed], names


def check_nothing_is_left(directory: Path, world: int = 1, nodes: int | None = None) -> None:
    """Nothing but committed steps, ``latest`` and what the next step may write over, nothing in the steps but what
    belongs there."""
    steps = checkpoint_index.committed_steps(directory)
    assert all(is_shard_name(path.name) for path in checkpoint_index.recycled(directory).glob("*"))
    names = sorted(path.name for path in directory.iterdir() if path != checkpoint_index.recycled(directory))
    assert names == ["latest", *(f"step-{step:010d}" for step in steps)], names
    for step in steps:
        files = sorted(path.name for path in checkpoint_index.step_directory(directory, step).iterdir())
        assert files == ["manifest.json", *(f"node-{node}.h5" for node in range(nodes or world))], (step, files)
    assert (directory / "latest").read_text() == f"{steps[-1]}\n"
