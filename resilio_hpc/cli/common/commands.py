"""The commands of ``resilio``, in the order of its help."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command. ``module`` has ``main(argv) -> int``."""

    name: str
    module: str
    summary: str


SUMMARY = "keeps training and MPI jobs on Slurm making progress, whatever breaks"
COMMANDS = (
    Command("launch", "resilio_hpc.cli.resilio_launch", "run a training program and keep it going (resilio-launch)"),
    Command("submit", "resilio_hpc.cli.submit", "a job from a ready script, with your values and command"),
    Command("resize", "resilio_hpc.cli.resize", "more nodes for a run while they are idle, fewer when others wait"),
    Command("runs", "resilio_hpc.cli.runs", "my runs: state, step, goodput"),
    Command("top", "resilio_hpc.cli.top", "my runs on one screen, refreshed"),
    Command("status", "resilio_hpc.cli.status", "how a run is doing: rounds, steps, failures, checkpoints"),
    Command("view", "resilio_hpc.cli.view", "live view of a run"),
    Command("check", "resilio_hpc.cli.check", "alerts on runs, for cron: what is wrong, since when, what to do"),
    Command("why", "resilio_hpc.cli.why", "what broke in a run, what was done, and how it stands, in one paragraph"),
    Command("logs", "resilio_hpc.cli.logs", "what the ranks have written, and the first failing rank's error"),
    Command("report", "resilio_hpc.cli.report", "where a run's time went over all its jobs: goodput, recoveries, cost"),
    Command("simulate", "resilio_hpc.cli.simulate", "the goodput of a run before it is submitted, beside the peers'"),
    Command("ledger", "resilio_hpc.cli.ledger", "the events of a run, in order"),
    Command("metrics", "resilio_hpc.cli.metrics", "what the nodes of a run use: processors, memory, GPUs"),
    Command("timeouts", "resilio_hpc.cli.timeouts", "how long a run may stall: learned limits, and how to set them"),
    Command("checkpoint", "resilio_hpc.cli.checkpoint", "have a run save now, and go on"),
    Command("chain", "resilio_hpc.cli.chain", "the jobs of a chain: how they stand, stop them, allow more"),
    Command("clean", "resilio_hpc.cli.clean", "removes what killed launches left on this node"),
    Command("ckpt", "resilio_hpc.cli.ckpt.ckpt", "list, show and verify checkpoints"),
    Command("diagnose", "resilio_hpc.cli.diagnose", "why something failed, from logs, a run or a job of Slurm"),
    Command("doctor", "resilio_hpc.cli.doctor", "what works on this machine for resilio, and why not"),
    Command("health", "resilio_hpc.cli.health.health", "check this node; why it was found wanting; the node daemon"),
    Command(
        "check-nodes",
        "resilio_hpc.cli.check_nodes.check_nodes",
        "pair the nodes of a job, and name those that are bad or slow",
    ),
    Command("site", "resilio_hpc.cli.site.site", "completion for shells, manual pages, a module file"),
    Command("install-hooks", "resilio_hpc.cli.install_hooks", "Slurm's prolog, epilog and health check for a site"),
    Command("drain", "resilio_hpc.cli.drain", "drain nodes for a reason of ours, never over another's drain"),
    Command("undrain", "resilio_hpc.cli.undrain", "end our own drains, and no others"),
    Command(
        "nodes",
        "resilio_hpc.cli.nodes.nodes",
        "nodes that failed, remembered across jobs: scores, what to avoid, weights",
    ),
    Command("plan", "resilio_hpc.cli.plan.plan", "parallel layouts: what they take in time and memory"),
    Command("drill", "resilio_hpc.cli.drill.drill", "faults made on purpose, and what became of the run"),
    Command("demo", "resilio_hpc.cli.demo", "watch a training job survive on a Slurm cluster of its own"),
    Command("devcluster", "resilio_hpc.cli.devcluster", "a small real Slurm cluster on this machine, to try things on"),
)
