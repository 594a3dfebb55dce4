"""One run of a campaign: the job, what its ledger says so far, and what its ranks left."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.ledger import Event, LedgerReader
from resilio_hpc.devtools.devcluster import DevCluster, RackMachines
from resilio_hpc.drills.acts import Actor
from resilio_hpc.drills.campaign_plan import CampaignPlan
from resilio_hpc.drills.drill import PRELOAD, SCRIPT, progressed
from resilio_hpc.drills.kind import HEARTBEAT_S
from resilio_hpc.drills.stamps import Life, read_lives

LOOK_S = 0.5
STEPS = 100_000_000  # at most: the file that says "enough" ends it
RESTARTS = 1_000_000


class CampaignRun:
    """A run on its own nodes of a cluster. ``directory``: its run directory, as seen from this machine."""

    def __init__(
        self, cluster: DevCluster[RackMachines], plan: CampaignPlan, name: str, nodes: tuple[str, ...]
    ) -> None:
        self.cluster = cluster
        self.nodes = nodes
        self.name = name
        self.directory = cluster.shared / name
        self.output = cluster.shared / f"{name}.txt"
        self.result = cluster.shared / f"{name}.result"
        self.events: list[Event] = []
        self.began = 0.0
        self._plan = plan
        self._reader = LedgerReader(self.directory / "ledger")
        self._next_look = self._next_ask = 0.0
        self._is_over = False
        self._actor: Actor | None = None

    def submit(self) -> None:
        """Submit the job."""
        self.began = time.time()
        job = self.cluster.submit(self._script())
        self._actor = Actor(self.cluster, job, "", self.directory)

    @property
    def actor(self) -> Actor:
        """Return what strikes this run."""
        assert self._actor is not None, "not submitted"
        return self._actor

    def _script(self) -> str:
        plan, name = self._plan, self.name
        launcher = Path(sys.executable).with_name("resilio-launch")
        torch = () if plan.torch else ("--no-torch", f"--preload={','.join(PRELOAD)}")
        arguments = [
            f"--nnodes={plan.min_nodes}:{plan.nodes}", f"--nproc-per-node={plan.ranks}", f"--run-dir=/shared/{name}",
            f"--heartbeat-timeout={HEARTBEAT_S:g}", f"--max-restarts={RESTARTS}", *plan.launch_arguments, *torch,
            str(SCRIPT), *(() if plan.torch else ("--without-torch",)), f"--steps={STEPS}", f"--every={plan.every}",
            f"--step-seconds={plan.step_s}", f"--elements={plan.elements}", f"--result=/shared/{name}.result",
            f"--stamps=/nvme/{name}", f"--digests=/nvme/{name}.digests", f"--enough=/nvme/{name}.enough",
        ]  # fmt: skip
        where = f"--nodes={plan.nodes} --nodelist={','.join(self.nodes)} --exclusive --no-kill --time=1-0"
        return (
            f"#!/bin/bash\n#SBATCH --job-name={name} {where}\n"
            f"#SBATCH --output=/shared/{name}.txt --open-mode=append\nexec {launcher} {' '.join(arguments)}\n"
        )

    # -- how it stands ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what is new in the ledger."""
        self.events += self._reader.read_new()
        self._next_look = time.monotonic() + LOOK_S

    def _look_when_due(self) -> None:
        if time.monotonic() >= self._next_look:
            self.look()

    def has_begun(self) -> bool:
        """Return whether it trains and has committed a step. Raises ResilioError where it ended instead."""
        self._look_when_due()
        if self.is_over():
            raise ResilioError(f"the job ended before training began: see {self.output}")
        return progressed(self.events)

    def is_over(self) -> bool:
        """Return whether it has ended, by its ledger; where that is silent, the queue is asked now and then."""
        self._look_when_due()
        if self._is_over or any(event.kind == "launch_ends" for event in self.events):
            self._is_over = True
        elif time.monotonic() >= self._next_ask:
            self._next_ask = time.monotonic() + 5.0
            asked = self.cluster.run("ctl", ["squeue", "-h", "-n", self.name, "-o", "%i"], check=False)
            self._is_over = asked.returncode == 0 and not asked.stdout.strip()
        return self._is_over

    def members(self) -> list[str]:
        """Return the nodes of the newest round."""
        self._look_when_due()
        found = next((event for event in reversed(self.events) if event.kind == "round"), None)
        return [str(node) for node in found.fields["members"]] if found is not None else []

    def leader(self) -> str:
        """Return the controller's node."""
        found = next((event for event in reversed(self.events) if event.kind == "controller"), None)
        return str(found.fields["node"]) if found is not None else self.nodes[0]

    def trains(self) -> bool:
        """Return whether all ranks of the newest round have done a step."""
        for event in reversed(self.events):
            if event.kind in ("first_step", "round"):
                return event.kind == "first_step"
        return False

    def end(self) -> None:
        """Let the ranks end after the step that they are in."""
        for node in self.nodes:
            (self.cluster.layout.nvme(node) / f"{self.name}.enough").touch()

    # -- what it left ----------------------------------------------------------------------------------------------

    def lives(self) -> list[Life]:
        """Return the ranks' stamps."""
        return read_lives([(node, self.cluster.layout.nvme(node) / self.name) for node in self.nodes])

    def digest_folders(self) -> list[Path]:
        """Return where rank 0 may have left what it held after each step."""
        return [self.cluster.layout.nvme(node) / f"{self.name}.digests" for node in self.nodes]
