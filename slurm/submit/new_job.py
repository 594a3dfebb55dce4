"""The nodes that are added to a new job's ``--exclude``: those that failed the user's runs lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from resilio_hpc.core.errors import HealthError, SlurmError, UsageError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.gres import Gres, parse_gres
from resilio_hpc.slurm.client.hostlist import compress, expand
from resilio_hpc.slurm.client.model import Partition
from resilio_hpc.slurm.client.slurm_errors import SubmitLimit, Unanswered
from resilio_hpc.slurm.node_faults.exclusion import Exclusion, choose, that_have
from resilio_hpc.slurm.node_faults.ledger import FaultLedger, users_directory
from resilio_hpc.slurm.node_faults.policy import FaultPolicy, fault_policy
from resilio_hpc.slurm.node_faults.score import NodeScore, scores
from resilio_hpc.slurm.submit import submission
from resilio_hpc.slurm.submit.template import FilledTemplate

# in a job: those of its excluded nodes that were added, and not named by the user
EXCLUDED_VARIABLE = "RESILIO_EXCLUDED"


def avoided(job: FilledTemplate, environment: Mapping[str, str], cwd: Path, client: SlurmClient) -> Exclusion:
    """Return the nodes to add; ``why`` tells also why none could be.

    Never raises: the job is submitted all the same.
    """
    run_dir = job.settings.get("run_dir", "resilio-runs/0").replace("/$SLURM_ARRAY_TASK_ID", "")
    directory = users_directory(environment, cwd / job.options.get("chdir", ".") / Path(run_dir).expanduser())
    if directory is None or "$" in str(directory):
        return Exclusion()
    policy = fault_policy()
    try:
        faults = FaultLedger(directory).read().faults
        if not any(one.score >= policy.exclude_at for one in scores(faults, time.time(), policy)):
            return Exclusion()
        cluster = environment.get("SLURM_CLUSTER_NAME", "") or commands.config_value("ClusterName")
        scored = scores(faults, time.time(), policy, cluster)
        return of_options(job.options, scored, client, policy)
    except (HealthError, SlurmError, UsageError) as error:
        return Exclusion(why=f"no node is avoided: {error}")


def of_options(
    options: Mapping[str, str], scored: Sequence[NodeScore], client: SlurmClient, policy: FaultPolicy
) -> Exclusion:
    """Return the nodes for sbatch's ``options``. Raises SlurmError, UsageError."""
    if "reservation" in options:
        return Exclusion(why="no node is avoided: a job in a reservation takes the nodes of it")
    partitions = _partitions(options.get("partition", ""), client.partitions())
    pool = that_have(client.nodes(), partitions, options.get("constraint", ""), gpus_wanted(options))
    if pool is None:
        return Exclusion(why=f"no node is avoided: which nodes are meant by constraint={options['constraint']}")
    needed = max(int(word) for word in options.get("nodes", "1").split("-") if word.isdecimal())
    by_hand = {*expand(options.get("exclude", "")), *expand(options.get("nodelist", ""))}
    return choose(scored, pool, needed, policy, by_hand, partitions)


def _partitions(named: str, known: Sequence[Partition]) -> Collection[str]:
    return named.split(",") if named else [one.name for one in known if one.default]


def gpus_wanted(options: Mapping[str, str]) -> Gres | None:
    """Return the GPUs of each node: from ``gpus_per_node=h100:8``, or ``gres=gpu:8``. Pure."""
    if options.get("gpus_per_node"):
        return next(iter(parse_gres(f"gpu:{options['gpus_per_node']}")), None)
    asked = parse_gres(options.get("gres", ""))
    return next((Gres(one.name, one.type, one.count or 1) for one in asked if one.name == "gpu"), None)


def submit(
    plain: FilledTemplate, avoids: Exclusion, excluding: Callable[[str], FilledTemplate],
    environment: Mapping[str, str], say: Callable[[str], None],
) -> submission.Submitted:  # fmt: skip
    """Submit the job; without the exclusion where Slurm finds that too few nodes are left.

    ``excluding``: the same job with another ``--exclude``. Raises as submission.submit.
    """
    if not avoids.nodes:
        return submission.submit(plain.script, plain.arguments, environment)
    job, ours = excluding(excluded(plain, avoids)), {EXCLUDED_VARIABLE: compress(avoids.nodes)}
    try:
        return submission.submit(job.script, job.arguments, {**environment, **ours})
    except (Unanswered, SubmitLimit):
        raise
    except SlurmError as error:
        if "node configuration" not in str(error):
            raise
        say(f"no node is avoided, since Slurm refuses that: {error}")
        return submission.submit(plain.script, plain.arguments, environment)


def excluded(plain: FilledTemplate, avoids: Exclusion) -> str:
    """Return the job's own list, with the added nodes. Pure."""
    own = [plain.options["exclude"]] if "exclude" in plain.options else []
    return ",".join([*own, compress(avoids.nodes)])
