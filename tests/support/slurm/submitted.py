"""A job of the tests, from `resilio submit` or sbatch on the dev cluster's login node, in a directory of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.devtools.demo.stage import events_of
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.drills.script import counting
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = ROOT / "sbatch_templates"
EXAMPLES = ROOT / "examples"
FAKES = Path(__file__).parent / "fakes"
GPT = (str(EXAMPLES / "train_gpt.py"), "--steps", "40", "--every", "10", "--layers", "1", "--width", "32")


COUNTING = Path(counting.__file__).resolve()


class Submitted:
    """One job, and those that it submits."""

    def __init__(self, cluster: DevCluster, name: str) -> None:
        self.cluster = cluster
        self.directory = cluster.shared / f"template-{name}"
        self.directory.mkdir(exist_ok=True)
        self.inside = f"/shared/{self.directory.name}"
        self.job = 0

    def submit(
        self, template: str, values: Sequence[str], command: Sequence[str], programs: str = ""
    ) -> Mapping[str, object]:
        """`resilio submit`, in the job's directory; returns what it says as JSON. ``programs``: first on PATH."""
        path = self.cluster.machines.environment()["PATH"]
        environment = {"PATH": f"{programs}:{path}" if programs else path}
        argv = [sys.executable, "-m", "resilio_hpc.cli.main", "submit", "--json", "--template", template, *values]
        done = self.cluster.run("ctl", [*argv, "--", *command], 60.0, env=environment, cwd=self.inside)
        said: dict[str, object] = json.loads(done.stdout)
        self.job = int(str(said["job"]))
        return said

    def sbatch(self, template: str, options: Sequence[str], command: Sequence[str], **settings: str) -> None:
        """The template as it is, by sbatch, with settings in the environment."""
        argv = ["sbatch", "--parsable", f"--chdir={self.inside}", *options, str(TEMPLATES / template), *command]
        self.job = int(self.cluster.run("ctl", argv, env=settings).stdout)

    def counts(self, steps: int) -> list[str]:
        """The command of a run without torch that counts for so many steps of a tenth of a second."""
        options = ["--without-torch", f"--steps={steps}", "--step-seconds=0.1", f"--result={self.inside}/result"]
        return ["--no-torch", str(COUNTING), *options]

    def wait(self) -> None:
        """Until nothing is left in the queue."""
        until(lambda: not self.cluster.run("ctl", ["squeue", "-h"]).stdout.strip(), "an empty queue", self.output)

    def wait_for(self, kind: str) -> Event:
        """Until the run has an event of this kind."""
        return until(
            lambda: next((event for event in self.events() if event.kind == kind), None), f"a {kind} event", self.output
        )

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.out")))

    def run_directories(self) -> list[Path]:
        walk = os.walk(self.directory / "resilio-runs")  # passes over what goes meanwhile
        return sorted(Path(folder) for folder, _, files in walk if "run.json" in files)

    def events(self) -> list[Event]:
        return [event for directory in self.run_directories() for event in events_of(directory)]

    def verdict(self) -> str:
        self.wait()
        (directory,) = self.run_directories() or [None]
        assert directory is not None, self.output()
        return str(json.loads((directory / "verdict.json").read_text())["verdict"])

    def fields(self, kind: str) -> Fields:
        return Fields(next(event.fields for event in self.events() if event.kind == kind))
