"""``resilio demo``: shows a real training job that survives faults, on its own Slurm cluster or on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import terminal
from resilio_hpc.core.errors import ResilioError, UsageError
from resilio_hpc.core.extras import require
from resilio_hpc.core.ledger import Event
from resilio_hpc.devtools import devcluster
from resilio_hpc.devtools.demo.play import DemoResult, Play
from resilio_hpc.devtools.demo.scenario import QUICK, Scenario
from resilio_hpc.devtools.demo.stage import DemoStage, LocalStage, SlurmStage, binds, why_no_slurm
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, SLURM_SERIES
from resilio_hpc.devtools.picture import Picture
from resilio_hpc.report.goodput import goodput
from resilio_hpc.report.overview import RunReader
from resilio_hpc.report.screen import screen

VIEW_LINES, VIEW_EVENTS = 38, 8  # of the picture of the live view
EXAMPLES = """examples:
  resilio demo                        five nodes, one of them a spare; faults; a chain of jobs
  resilio demo --quick                smaller and shorter
  resilio demo --local                without Slurm
"""


def main(argv: list[str]) -> int:
    """Run the demo. Exit code 0 when every fault was overcome and the final parameters are the same bits."""
    parser = Parser(
        prog="resilio demo",
        description="Watch a real training job survive, on a Slurm cluster of its own or on this machine.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where summary.json and the logs go")
    parser.add_argument("--quick", action="store_true", help="smaller and shorter")
    parser.add_argument("--local", action="store_true", help="on this machine, without Slurm")
    parser.add_argument("--slurm", default=HOST_SERIES, choices=list(SLURM_SERIES), help="Slurm series")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="keep what is shown as an SVG picture")
    parser.add_argument("--view-picture", type=Path, metavar="FILE", help="the same of the run's live view")
    options = parser.parse_args(argv)
    console = Screen()
    try:
        for flag, path in (("--picture", options.picture), ("--view-picture", options.view_picture)):
            if path and not path.absolute().parent.is_dir():
                raise UsageError(f"{flag} {path}: there is no directory {path.absolute().parent}")
        code = _demo(options, console)
        if options.picture:
            console.picture.save(options.picture, "resilio demo" + " --quick" * options.quick)
        return code
    except ResilioError as error:
        print(f"resilio demo: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130


def _demo(options: argparse.Namespace, console: Screen) -> int:
    require("torch", "the demo's training")
    scenario = QUICK if options.quick else Scenario()
    options.out.mkdir(parents=True, exist_ok=True)
    reason = "asked for" if options.local else why_no_slurm()
    if reason:
        console.print(f"No Slurm here ({reason}): the same job runs on localhost, which plays {scenario.nodes} nodes.")
    scratch = Path(tempfile.mkdtemp(prefix="resilio-demo-"))
    stage: DemoStage = LocalStage(scenario, scratch) if reason else _cluster_stage(scenario, options.slurm)
    if stage.slurm_version:
        console.print(f"A Slurm {stage.slurm_version} cluster of {scenario.nodes} nodes is up on this machine.")
    try:
        look = ViewPicture(options.view_picture).look if options.view_picture else None
        result = Play(stage, scenario, console.print, look).perform(goodput_of)
    finally:
        _keep(stage, options.out)
        stage.close()
        shutil.rmtree(scratch, ignore_errors=True)
    (options.out / "summary.json").write_text(result.as_json() + "\n")
    console.print(table(result))
    console.print(
        f"jobs in the chain: {result.links}   goodput: "
        + (f"{result.goodput:.1%}" if result.goodput is not None else "unknown")
        + f"   final parameters identical to the undisturbed run: [bold]{'yes' if result.identical else 'NO'}[/bold]"
    )
    console.print(
        "Goodput is the share of the time in which steps were made that count. The faults here come within minutes;"
        " on a cluster, hours lie between them."
    )
    console.print(
        f"the facts: {options.out}/summary.json   the runs: {options.out}/disturbed, {options.out}/undisturbed"
    )
    return 0 if result.success else 1


def _cluster_stage(scenario: Scenario, slurm: str) -> DemoStage:
    cluster = devcluster.start(f"demo{os.getpid()}", nodes=scenario.nodes, slurm=slurm, binds=binds())
    return SlurmStage(cluster, scenario)


def goodput_of(events: list[Event]) -> float | None:
    """Return the share of the time in which steps were made that count."""
    return goodput(events).share


def table(result: DemoResult) -> Table:
    """Return the faults with their recovery times."""
    made = Table(title="What happened, and how long it took")
    for name in ("fault", "node", "recovered", "recovery", "steps done again"):
        made.add_column(name, justify="right" if name in ("recovery", "steps done again") else "left")
    for fault in result.faults:
        made.add_row(
            fault.kind.replace("_", " "),
            fault.node or "all",
            "[green]yes[/green]" if fault.recovered else "[red]NO[/red]",
            f"{fault.recovery_s:.2f} s" if fault.recovery_s is not None else "",
            "" if fault.lost_steps is None else str(fault.lost_steps),
        )
    return made


def _keep(stage: DemoStage, out: Path) -> None:
    """Copy the runs' files (without checkpoints) to the output directory."""
    for name in ("undisturbed", "disturbed"):
        source = stage.directory / name
        if source.is_dir():
            shutil.rmtree(out / name, ignore_errors=True)
            shutil.copytree(source, out / name, ignore=shutil.ignore_patterns("checkpoints", "secret"))
        console_output = stage.directory / f"{name}.txt"
        if console_output.exists():
            shutil.copy(console_output, out / f"{name}.txt")


class Screen:
    """Prints, and remembers for a picture what it printed."""

    def __init__(self) -> None:
        self._terminal = terminal.console(highlight=False, soft_wrap=True)
        self.picture = Picture()

    def print(self, *objects: Any) -> None:
        """Print rich's renderables."""
        self._terminal.print(*objects)
        self.picture.print(*objects)


class ViewPicture:
    """A picture of the live view of a run, taken when it trains again after a fault; the last one stays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recovered = 0

    def look(self, run: Path) -> None:
        """Take a picture if the run trains, and has recovered from more faults than at the last one."""
        overview = RunReader(run).overview(time.time())
        recovered = sum(fault.recovered for fault in overview.faults)
        if overview.state != "running" or recovered <= self._recovered:
            return
        self._recovered = recovered
        picture = Picture()
        picture.print(screen(overview, VIEW_LINES, VIEW_EVENTS, picture.width, internals=False))
        picture.save(self._path, "resilio view RUN_DIR")
