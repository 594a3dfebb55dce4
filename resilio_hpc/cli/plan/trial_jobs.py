"""Short runs as jobs: a batch script for each, a table that their step times are read back into."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.cli.plan.job import job_of
from resilio_hpc.cli.plan.predict import written
from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.submit import submission

START_S = 120.0  # of a job until its first iteration: processes, libraries, compiling
TABLE = "runs.csv"


@dataclass(frozen=True)
class Duration:
    """How long a run takes: its iterations, their seconds, and the upper end of their band."""

    steps: int
    iteration_s: float
    high_s: float

    @property
    def expected_s(self) -> float:
        return START_S + self.steps * self.iteration_s

    @property
    def limit_minutes(self) -> int:
        """Return a time limit that leaves room for a cluster that is slower than was thought."""
        return math.ceil((5 * START_S + 2 * self.steps * self.high_s) / 60)


def write(
    folder: Path, choices: Sequence[Choice], rows: Sequence[Mapping[str, str]], lasting: Sequence[Duration],
    command: Sequence[str], words: Sequence[str],
) -> list[Path]:  # fmt: skip
    """Write a batch script for each run, and the table with their run directories. Return the scripts.

    ``command``: the training script and its arguments; ``words``: KEY=VALUE for the jobs. Raises UsageError.
    """
    folder = folder.absolute()
    scripts = [folder / f"run-{number}.sbatch" for number in range(1, len(choices) + 1)]
    texts = [
        _script(choice, time, script.with_suffix(""), command, words)
        for choice, time, script in zip(choices, lasting, scripts, strict=True)
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(script.with_suffix("").exists() for script in scripts):
            raise UsageError(f"--jobs {folder}: it holds runs already: name another directory")
        for script, text in zip(scripts, texts, strict=True):
            script.write_text(text)
    except OSError as error:
        raise UsageError(f"--jobs {folder}: {error.strerror}") from None
    told = [{**row, "run_dir": str(script.with_suffix(""))} for row, script in zip(rows, scripts, strict=True)]
    written(folder / TABLE, list(told[0]), told)
    return scripts


def _script(choice: Choice, time: Duration, run_dir: Path, command: Sequence[str], words: Sequence[str]) -> str:
    """Return the batch script of one run."""
    template = "single-node" if choice.offer.shape.nodes == 1 else "multi-node"
    given = {word.partition("=")[0].strip().replace("-", "_") for word in words}
    own = [] if "time" in given else [f"time={time.limit_minutes}"]
    if "run_dir" in given:
        raise UsageError("--set run_dir: each run gets a directory of its own in --jobs DIR")
    argv = [word.replace("{steps}", str(time.steps)) for word in command]
    job = job_of(template, [*words, *own, f"run_dir={run_dir}"], argv, os.environ)
    exports = [f"export {name}={value}" for name, value in choice.environment().items()]
    return job.rendered(choice, exports)[0].script


def tell(scripts: Sequence[Path]) -> int:
    """Print the commands that submit the jobs, and the one that reads their step times."""
    for script in scripts:
        print(f"sbatch {shlex.quote(str(script))}")
    _next(scripts[0].parent)
    return 0


def submit(scripts: Sequence[Path]) -> int:
    """Submit the jobs. Raises SlurmError."""
    for script in scripts:
        job = submission.submit(script.read_text(), (), submission.own_environment(os.environ)).job
        print(f"{script.stem}: submitted as job {job}", flush=True)
    _next(scripts[0].parent)
    return 0


def _next(folder: Path) -> None:
    print(f"then: resilio plan calibrate --rows {shlex.quote(str(folder / TABLE))} --out calibration.toml")
