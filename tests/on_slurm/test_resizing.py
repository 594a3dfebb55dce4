"""A run on a real Slurm takes idle nodes in and gives them back to others, while it trains, and loses no sample.

By ``resilio resize`` beside it, and by the launcher itself (``--resize``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.devtools.demo.stage import events_of
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from resilio_hpc.slurm.chain.chain import read_links
from tests.support.clusters import each_series
from tests.support.slurm import resized_training
from tests.support.slurm.submitted import Submitted
from tests.support.waiting import PATIENCE_S, until

SCRIPT = str(resized_training.__file__)
pytestmark = each_series(HOST_SERIES, slow=[NEWEST_SERIES])
POLICY = "look_s = 1.0\nsettle_s = 1.0\ncool_down_s = 2.0\nrestart_s = 1.0\nhorizon_s = 36000.0\nmin_efficiency = 0.0\n"


class Resized:
    """An elastic run of two nodes that may have all three of its partition.

    ``by``: "hand", with a resizer on the login node, and a scaled batch; "launcher", and a batch that is kept."""

    def __init__(self, cluster: DevCluster, by: str) -> None:
        self.cluster, self.by_hand = cluster, by == "hand"
        self.job = Submitted(cluster, f"resized-by-{by}")
        self.out = self.job.directory / "result.json"
        (self.job.directory / "policy.toml").write_text(POLICY)
        values = [
            "gpus_per_node=2",
            "ranks_per_node=1",
            "time=30",
            "nodes=2",
            "min_nodes=1",
            "max_nodes=3",
            "partition=trio",
        ]
        programs = self.job.directory / "bin"
        programs.mkdir()
        self.busy = programs / "busy"  # what nvidia-smi says
        self.busy.write_text("7\n")
        (programs / "nvidia-smi").write_text('#!/bin/sh\nexec cat "${0%/*}/busy"\n')
        (programs / "nvidia-smi").chmod(0o755)
        resize = ["--resize", f"--resize-policy={self.job.inside}/policy.toml", "--resize-options=--max-nodes 3"]
        script = [SCRIPT, f"{self.job.inside}/result.json", "scale" if self.by_hand else "keep"]
        command = ["--chain", "--no-torch", *([] if self.by_hand else resize), *script]
        self.job.submit("elastic", values, command, f"{self.job.inside}/bin")
        self.path = self.job.directory / "resilio-runs" / str(self.job.job)
        self.run_dir = f"{self.job.inside}/resilio-runs/{self.job.job}"
        self.resizer: subprocess.Popen[bytes] | None = None

    def resize(self, *words: str) -> list[str]:
        """The command, as it runs on the login node."""
        argv = [sys.executable, "-m", "resilio_hpc.cli.main", "resize", self.run_dir, *words]
        return [*argv, "--batch=scale", "--policy", f"{self.job.inside}/policy.toml"]

    def watch(self) -> None:
        argv = self.cluster.machines.command("ctl", self.resize("--watch", "1"), cwd=self.job.inside)
        with (self.job.directory / "resize.txt").open("wb") as output:
            self.resizer = subprocess.Popen(
                argv, stdout=output, stderr=output, env=self.cluster.machines.environment(), start_new_session=True
            )

    def resizer_of_launcher(self) -> int:
        """The process, as this host numbers it."""
        wanted = f"resize\0{self.run_dir}\0".encode()
        (found,) = [path for path in Path("/proc").glob("[0-9]*") if wanted in _words_of(path)]
        return int(found.name)

    def said(self) -> str:
        path = self.job.directory / "resize.txt"
        return (path.read_text() if path.exists() else "") + self.job.output()

    def until(self, reached: Callable[[], bool]) -> None:
        ended = (self.path / "verdict.json").exists
        until(reached, "the run has not come so far", self.said, alive=lambda: not ended(), poll_s=0.1)

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in events_of(self.path) if event.kind == kind]

    def sizes(self) -> list[int]:
        """Nodes of each round whose ranks have all done a step."""
        started = {event.fields["round"] for event in self.of_kind("first_step")}
        return [len(e.fields["members"]) for e in self.of_kind("round") if e.fields["round"] in started]

    def next_job_asks_for(self) -> int:
        """Nodes of the next job of the chain."""
        successor = read_links(self.path)[-1].job
        return int(self.cluster.run("ctl", ["squeue", "-h", "-j", successor, "-o", "%D"]).stdout)

    def resizes(self, action: str) -> list[dict[str, object]]:
        return [e.fields for e in self.of_kind("resize") if e.fields["action"] == action and e.fields["acted"]]


def _words_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def run(cluster: DevCluster, request: pytest.FixtureRequest) -> Iterator[Resized]:
    resized = Resized(cluster, request.param)
    yield resized
    if resized.resizer is not None:
        resized.resizer.kill()
        resized.resizer.wait(30.0)


@pytest.mark.parametrize("run", [pytest.param("hand", marks=pytest.mark.slow), "launcher"], indirect=True)
def test_a_run_grows_by_an_idle_node_gives_it_to_somebody_who_waits_and_loses_no_sample(
    cluster: DevCluster, run: Resized
) -> None:
    if run.by_hand:
        run.until(lambda: len(run.of_kind("committed")) > 1)
        dry = json.loads(cluster.run("ctl", run.resize("--dry-run", "--json"), 60.0, cwd=run.job.inside).stdout)
        assert (dry["action"], dry["sizes"]) == ("grow", [1]), dry
        assert run.of_kind("resize") == []
        run.watch()
    else:
        run.until(lambda: "idle_gpus" in [event.fields["code"] for event in run.of_kind("resize")])
        run.busy.write_text("93\n")
    run.until(lambda: run.sizes()[-1:] == [3] and run.next_job_asks_for() == 3)  # of the chain
    run.until(lambda: run.resizes("reshape") != [])  # written down after Slurm has it
    if not run.by_hand:  # one that dies is started again
        os.kill(run.resizer_of_launcher(), signal.SIGKILL)
    other = cluster.submit(
        "#!/bin/sh\nsleep 3\n", ["--partition=trio", "--nodes=1", "--exclusive", "--time=1"], user="user"
    )
    run.until(lambda: run.sizes()[-1:] == [2] and run.next_job_asks_for() == 2)
    cluster.wait_for_job(other, ["RUNNING", "COMPLETED"], PATIENCE_S)

    run.out.with_suffix(".end").touch()
    run.job.wait()
    if run.resizer is not None:
        assert run.resizer.wait(PATIENCE_S) == 0, run.said()  # the run is over, and so is the watch
    else:
        assert run.said().count("the resizer ended (exit code -9), and is started again") == 1
    result = json.loads(run.out.read_text())
    (samples,) = result["position"]
    assert result["used"] == resized_training.uses(samples)
    assert max(result["used"]) - min(result["used"]) <= 1
    if run.by_hand:
        assert samples > result["steps"] * resized_training.BATCH  # three ranks had half as much again
    else:
        assert result["weights"] == resized_training.expected(result["steps"])["weights"]
        assert samples == result["steps"] * resized_training.BATCH

    (first, *_), (given, *_) = run.resizes("grow"), run.resizes("shrink")
    assert (first["code"], given["code"]) == ("idle_nodes", "others_wait")
    assert f"job {other} of user waits for 1 node" in str(given["reason"])
    assert first["jobs"] == given["jobs"]
    assert [fields["sizes"] for fields in run.resizes("reshape")][:2] == [[3], [2]]  # it may have grown once more
    assert run.of_kind("rank_failed") == run.of_kind("node_lost") == []
