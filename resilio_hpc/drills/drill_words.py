"""A drill in words: its short name, what it does, what should happen, where it can be done, what it needs. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError
from resilio_hpc.drills.kind import NODE_LOSS, Act, Drill
from resilio_hpc.drills.table import DRILLS
from resilio_hpc.events.event_text import FAULTS

LIVE_ACTS = ("kill_rank", "abort_rank", "stop_rank", "kill_agent")
"""What may be done to a run that trains for real: it hurts processes of the run, and nothing else."""
DEV_CLUSTER, LIVE_RUN = "dev cluster", "live run"
_ROLES = {
    "": "", "leader": "the controller's node", "batch_host": "the batch host", "follower": "a node",
    "follower2": "another node", "apart": "half of the nodes", "with_leader": "the controller's half of the nodes",
}  # fmt: skip
_ACTS = {
    "kill_rank": "SIGKILL for a rank on {}",
    "abort_rank": "SIGABRT for a rank on {}, as NCCL's watchdog does",
    "stop_rank": "SIGSTOP for a rank on {}: its peers wait in a collective",
    "throttle_rank": "a fiftieth of a processor for a rank on {}",
    "slow_link": "a slow network card on {}",
    "slow_loader": "slow data loaders on {}",
    "kill_agent": "SIGKILL for the agent on {}",
    "kill_srun": "SIGKILL for an srun",
    "power_off": "power cut of {}",
    "boot": "power on",
    "partition": "network cut of {}",
    "heal": "network back",
    "split": "network cut between two halves",
    "hang_shared": "the shared directory hangs",
    "release_shared": "it answers again",
    "kill_slurmd": "SIGKILL for slurmd on {}",
    "start_slurmd": "slurmd starts again",
    "kill_slurmctld": "SIGKILL for slurmctld",
    "start_slurmctld": "slurmctld starts again",
    "slow_node": "{} computes slowly",
    "end_slow": "it is as fast as before",
    "test_nodes": "a test of the nodes is ordered",
    "set_down": "an administrator sets {} down",
    "requeue": "scontrol requeue",
    "scancel": "scancel",
    "scancel_kill": "scancel -s KILL",
    "submit_urgent": "a job of a partition that preempts",
    "submit_joiner": "a job of another node joins",
    "save_job": "",
    "fill_local": "the local disk of {} becomes full",
    "lose_packets": "network cut of {}, shorter than the heartbeat limit",
    "gpu_bad": "root's health checks find memory errors on a (fake) GPU of {}",
    **{f"stop_{role}": f"SIGSTOP for the {role.replace('_', ' ')} on {{}}"
       for role in ("agent", "zygote", "store", "saver", "io_worker")},
}  # fmt: skip
_SCRIPT = {
    "--raise-at": "the script raises an exception",
    "--exit-at": "a rank exits with 0 too early",
    "--fail": "the script fails with the text of a {} error",
    "--hang": "the script hangs: {}",
    "--hang-before-start": "a rank hangs before it joins: {}",
    "--flip-at": "one bit of a parameter flips on one rank",
}


@dataclass(frozen=True)
class DrillWords:
    """A drill as ``resilio drill list`` shows it. ``where``: places in which it can be done."""

    name: str
    title: str
    does: str
    should: str
    where: tuple[str, ...]
    needs: tuple[str, ...]


def slug(name: str) -> str:
    """Return a name for the command line and for files."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("'", "")).strip("-")


def words_of(drill: Drill) -> DrillWords:
    """Return a drill in words."""
    where = (DEV_CLUSTER, LIVE_RUN) if is_live(drill) else (DEV_CLUSTER,)
    return DrillWords(slug(drill.full_name), drill.full_name, _does(drill), _should(drill), where, _needs(drill))


def is_live(drill: Drill) -> bool:
    """Return whether it can be done to a live run."""
    return (
        len(drill.acts) == 1 and drill.acts[0].do in LIVE_ACTS and not drill.srun and drill.shared_mount == "bind"
        and not drill.script_arguments and not drill.launch_arguments
    )  # fmt: skip


def drill_of(name: str) -> Drill:
    """Return the drill of a name or a title. Raises UsageError, which names the nearest ones."""
    wanted = slug(name)
    found = next((drill for drill in DRILLS if slug(drill.full_name) == wanted), None)
    if found is None:
        near = difflib.get_close_matches(wanted, [slug(drill.full_name) for drill in DRILLS], 1, 0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"no drill {name!r}: {hint}resilio drill list shows them")
    return found


def act_words(act: Act) -> str:
    """Return an act in words."""
    said = _ACTS.get(act.do, act.do.replace("_", " ")).format(_ROLES[act.to] or "a node")
    return f"{said} after {act.after_s:g} s" if said and act.after_s >= 2.0 else said


def _does(drill: Drill) -> str:
    said = [words for words in map(act_words, drill.acts) if words]
    flags = drill.script_arguments
    for flag, value in zip(flags, (*flags[1:], ""), strict=False):
        if flag in _SCRIPT:
            said.append(_SCRIPT[flag].format(value))
    if drill.time_limit == 1:
        said.append("the job reaches its time limit")
    return "; then ".join(said)


def _should(drill: Drill) -> str:
    if drill.verdict != "completed":
        return f"the run ends with the verdict {drill.verdict.replace('_', ' ')}"
    found = []
    if drill.hang:
        found.append(f"a hang is found ({drill.hang})")
    if drill.fault:
        found.append(f"the rank is blamed ({drill.fault.replace('_', ' ')})")
    if drill.kinds and not found:
        found.append("recovery from " + " or ".join(FAULTS.get(kind, kind) for kind in drill.kinds))
    if drill.slow:
        found.append(f"the slow rank is named ({drill.slow.replace('_', ' ')})")
    if drill.jobs > 1:
        found.append("the next job carries on")
    if drill.world_size == 4 and drill.kinds:
        found.append("fewer ranks go on")
    elif drill.spares and any(act.do in NODE_LOSS for act in drill.acts):
        found.append("a spare takes over")
    if drill.told and not found:
        found.append(f"the ledger says {drill.told}")
    if drill.steps_meanwhile:
        found.append("training goes on meanwhile")
    return ", ".join([*found, "the result is exactly right"])


def _needs(drill: Drill) -> tuple[str, ...]:
    found = []
    if drill.shared_mount != "bind":
        found.append("FUSE")
    if drill.slow == "cpu_throttled":
        found.append("control groups v1")
    if drill.torch:
        found.append("torch")
    if drill.gpus:
        found.append("fake GPUs")
    if drill.preemption:
        found.append("a partition that preempts")
    return tuple(found)


def listed(drills: Sequence[Drill] = DRILLS) -> list[DrillWords]:
    """Return all drills in words."""
    return [words_of(drill) for drill in drills]
