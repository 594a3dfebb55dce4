"""Runs of the examples for frameworks under the real launcher, in the environment that has the frameworks."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import ROOT, SUPPORT, scrubbed
from tests.support.waiting import PATIENCE_S, until

PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
STRIKE, SCALED = (str(SUPPORT / "frameworks" / name) for name in ("strike.py", "scaled.py"))
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(ROOT / ".venv-frameworks" / "extensions")}


@dataclass(frozen=True)
class Framework:
    """A framework's example.

    ``replicated``: a lost rank costs no finished step. ``is_scaled``: under scaled.py.
    """

    script: str
    modules: tuple[str, ...]
    words: tuple[str, ...] = ()
    has_workers: bool = True
    replicated: bool = True
    is_scaled: bool = False

    def need(self) -> None:
        """Skip where the environment of scripts/frameworks_setup.sh lacks it."""
        look = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
        command = [PYTHON, "-c", look, *self.modules]
        if not PYTHON.exists() or subprocess.run(command, timeout=PATIENCE_S).returncode:
            pytest.skip(f"no {' and '.join(self.modules)} here (scripts/frameworks_setup.sh)")

    @property
    def command(self) -> list[str]:
        """The example, and the words that make it this framework's case."""
        return [*[SCALED] * self.is_scaled, str(ROOT / "examples" / self.script), *self.words]


def _zero(stage: int, precision: str, *more: str) -> Framework:
    words = ("--stage", str(stage), "--precision", precision, *more)
    return Framework("train_deepspeed.py", ("deepspeed",), words, replicated=False)


FRAMEWORKS = {
    "lightning": Framework("train_lightning.py", ("lightning",)),
    "transformers": Framework("train_transformers.py", ("transformers", "accelerate"), has_workers=False),
    "accelerate": Framework("train_accelerate.py", ("accelerate",)),
    "ignite": Framework("train_ignite.py", ("ignite",)),
    "deepspeed-1": _zero(1, "fp32"),
    "deepspeed-2": _zero(2, "bf16"),
    "deepspeed-3": _zero(3, "fp32"),
}
# What is not for every case of those above.
VARIANTS = {
    "lightning-stateful": replace(
        FRAMEWORKS["lightning"], modules=("lightning", "torchdata"), words=("--stateful", "--workers", "1")
    ),
    "transformers-fp16": replace(FRAMEWORKS["transformers"], is_scaled=True),
    "deepspeed-3-fp16": replace(_zero(3, "fp16", "--own-loader", "--offload"), is_scaled=True),
}


class FrameworkRun:
    """One run in the folder ``path``; each call is a launch of it.

    ``is_watched``: by strike.py. ``options``, ``variables``: more of the launcher's.
    """

    def __init__(
        self, path: Path, ranks: int, command: Sequence[str], *, is_watched: bool = True, python: Path = PYTHON,
        options: Sequence[str] = (), **variables: str,
    ) -> None:  # fmt: skip
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.ranks, self._command, self._python = path, ranks, list(command), str(python)
        self._watcher = [STRIKE] if is_watched else []
        self._options, self._variables = options, variables

    def start(self, *strike: str) -> subprocess.Popen[str]:
        """Start a launch; ``strike``: what strike.py is to do."""
        return self._start(["resilio_hpc.cli.resilio_launch", "--run-dir", "run", *self._options], strike)

    def _start(self, launcher: Sequence[str], strike: Sequence[str] = (), **more: str) -> subprocess.Popen[str]:
        variables = {
            **DEEPSPEED,
            **self._variables,
            **more,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
        }
        launch = [self._python, "-m", *launcher, "--nproc-per-node", str(self.ranks)]
        return subprocess.Popen(
            [*launch, *self._watcher, *strike, *self._command],
            cwd=self.path, text=True, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, env=scrubbed(**variables),
        )  # fmt: skip

    def launch(self, *strike: str) -> str:
        """Launch, and return what was printed, after a good end."""
        return self._end_of(self.start(*strike))

    def torchrun(self, other: FrameworkRun | None = None) -> str:
        """Start under torchrun, from our checkpoints of another run. Returns what was printed, after a good end."""
        where = {} if other is None else {"RESILIO_CHECKPOINT_DIR": str(other.path / "run" / "checkpoints")}
        return self._end_of(self._start(["torch.distributed.run", "--standalone"], **where))

    def _end_of(self, launch: subprocess.Popen[str]) -> str:
        said, _ = launch.communicate(timeout=PATIENCE_S)
        assert launch.returncode == 0, said[-6000:]
        return said

    def stop_and_go_on(self, step: int) -> str:
        """Have the launcher end on SIGTERM after so many steps, and launch again. Returns what the latter printed."""
        first = self.start(str(step), "0", "wait")
        until((self.path / "struck").exists, "a step is under way", lambda: first.poll())
        first.terminate()
        until(lambda: self.events("stopping"), "the stop is under way", lambda: first.poll())
        (self.path / "go on").touch()
        said, _ = first.communicate(timeout=PATIENCE_S)
        assert not (self.path / "end").exists(), said[-3000:]
        return self.launch()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The fields of the ledger's events of one kind."""
        return [event.fields for event in read_ledger(self.path / "run" / "ledger") if event.kind == kind]

    def restored(self) -> list[int]:
        """The steps from which its rounds have begun; -1: from the beginning."""
        return [event["restored"] for event in self.events("first_step")]

    @property
    def end(self) -> list[str]:
        """What each rank's optimizers and model held at the end."""
        return [(self.path / "end" / str(rank)).read_text() for rank in range(self.ranks)]
