"""Ledger entries as text: one line for a person about each kind of event. Pure, and safe for any fields.

There is one table for the launcher's console, ``resilio ledger`` and the live view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.events.correctness_text import CORRECTNESS_EVENTS
from resilio_hpc.events.environment_text import ENVIRONMENT_EVENTS
from resilio_hpc.events.failure_text import drill, exit_words, late_end, rank_failed
from resilio_hpc.events.hang_text import HANG_EVENTS
from resilio_hpc.events.launch_text import LAUNCH_EVENTS, verdict_of
from resilio_hpc.events.memory_text import MEMORY_EVENTS
from resilio_hpc.events.phrases import names, plural, read_by, restored, seconds
from resilio_hpc.events.rungs import rung_words
from resilio_hpc.events.slow_text import SLOW_EVENTS

FAULTS = {
    "rank_killed": "a killed rank",
    "rank_exception": "a failed rank",
    "early_exit": "a rank that left early",
    "restore_failed": "a copy that could not be restored",
    "spawn": "a rank that could not be started",
    "store_lost": "the loss of the rendezvous store",
    "spawner_lost": "the loss of the process that forks ranks",
    "node_lost": "the loss of a node",
    "spare_lost": "the loss of a spare node",
    "agent_lost": "the loss of an agent",
    "controller_lost": "the loss of the controller",
    "slow_start": "a start that took too long",
    "hang": "a hang",
    "corruption": "silent corruption",
}


def words(kind: str, fields: Mapping[str, Any]) -> str:
    """Return one line about an event. Kinds that are not in the table show their fields."""
    f = Fields(fields)
    tell = _TABLE.get(kind)
    return printable(tell(f) if tell else _anything(f), 300)


def _anything(f: Fields) -> str:
    shown = {name: value for name, value in f.data.items() if name != "v" and value not in (None, "")}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _echoes(f: Fields) -> str:
    cause = f.text("node", "?") if f.whole("rank") is None else f"rank {f.whole('rank')} on {f.text('node', '?')}"
    place = f"; tracebacks: {f.text('logs')}/{f.whole('round')}" if f.text("logs") else ""
    if f.data.get("echo"):
        return f"{plural(f.whole('count'), 'other rank')} lost a connection, or timed out, like {cause}{place}"
    return f"{plural(f.whole('count'), 'peer')} lost the connection to {cause}{place}"


def _origin(f: Fields) -> str:
    ends, evidence = plural(f.whole("ends"), "end"), f.text("evidence", "?")
    if f.data.get("primary") is not True:
        return f"no primary cause of {ends}: {evidence}"
    return f"origin of {ends}: {evidence} ({f.number('confidence') or 0.0:.0%} sure)"


def _waiting(f: Fields) -> str:
    absent = [str(node) for node in f.data.get("absent") or []]
    return (
        f"waiting for {names(absent)}: {plural(f.whole('have'), 'node')} of at least {f.whole('want')} came so far; "
        f"for {f.whole('up_to_s')} s more (--join-timeout)"
    )


def _start(f: Fields) -> str:
    source, _, step = f.text("restore").partition(":") if f.data.get("acted", True) else ("", "", "")
    going_on = f"restoring {restored(source, int(step))}" if step.isdigit() else "without a checkpoint of ours"
    return f"round {f.whole('round')}: ranks start, {going_on}{_fetched(f.data.get('fetched'))}"


def _fetched(found: Any) -> str:
    """Return the ranks whose own node did not hold their snapshots, by the source of those."""
    ranks: dict[str, list[str]] = {}
    for rank, source in found.items() if isinstance(found, dict) else ():
        ranks.setdefault("the shared directory" if source == "committed" else str(source), []).append(str(rank))
    return "".join(f"; rank {names(who)} from {where}" for where, who in ranks.items())


def _checkpoint_made(f: Fields) -> str:
    if f.text("why"):
        return f"no checkpoint as ordered: {f.text('why')}"
    return f"the checkpoint that was ordered is committed: step {f.whole('step')}, after {seconds(f.number('seconds'))}"


def _last_step(f: Fields) -> str:
    node, step = f.text("node", "?"), f.whole("step")
    if step is None or step < 0:
        return f"{node} could not save the last finished step: {f.text('why') or 'no rank had it, or not every one'}"
    made = f.data.get("made") or []
    of_lost = f", that of rank {names([str(rank) for rank in made])} from another rank's" if made else ""
    failed = f"; not of all ranks: {f.text('why')}" if f.text("why") else ""
    return f"{node} has saved step {step}, the last finished one, in {seconds(f.number('seconds'))}{of_lost}{failed}"


def _first_step(f: Fields) -> str:
    step, before = f.whole("step"), f.whole("restored")
    from_where = f", restored {restored(f.text('source'), before)}" if before is not None and before >= 0 else ""
    took = f" in {seconds(f.number('restore_s'))}" if from_where and f.has("restore_s") else ""
    return f"round {f.whole('round')}: every rank has done step {step}{from_where}{took}"


def _committed(f: Fields) -> str:
    waited = f"; training waited {seconds(f.number('blocked_s'))} for it" if f.number("blocked_s") is not None else ""
    return f"checkpoint of step {f.whole('step')} is committed{waited}"


def _decision(f: Fields) -> str:
    would = "" if f.data.get("acted", True) else ", not done"
    return f"decision{would}: {rung_words(f.text('rung'))} ({f.text('reason')})"


def _recovered(f: Fields) -> str:
    kind, lost = f.text("kind"), f.whole("lost_steps")
    what = FAULTS.get(kind, kind.replace("_", " "))
    again = "" if lost is None else f"; {plural(lost, 'step') if lost else 'no step'} to do again"
    took = f.number("recovery_s")
    if took is None:  # of ranks that report no steps it is unknown when they train again
        return f"recovered from {what}: the ranks run, or have ended well{again}"
    return f"recovered from {what} in {seconds(took)}{again}"


def _verdict(f: Fields) -> str:
    return f"{verdict_of(f)}: {f.text('reason')}"


def _warned(f: Fields) -> str:
    return f"SIG{f.text('signal', '?')} reached {f.text('node', '?')}: {_reason(f)}"


def _reason(f: Fields) -> str:
    return f.text("reason").replace("_", " ")


_TABLE: dict[str, Callable[[Fields], str]] = {
    **CORRECTNESS_EVENTS,
    **ENVIRONMENT_EVENTS,
    **LAUNCH_EVENTS,
    **MEMORY_EVENTS,
    # agents
    "agent": lambda f: f"agent starts on {f.text('node', '?')} with {plural(f.whole('slots'), 'slot')}",
    "agent_ends": lambda f: f"agent on {f.text('node', '?')} ends: {verdict_of(f)}",
    "controller": lambda f: f"{f.text('node', '?')} becomes controller of epoch {f.whole('epoch')}",
    "stepped_down": lambda f: f"controller of epoch {f.whole('epoch')} steps down: {_reason(f)}",
    "suspended": lambda f: (
        f"controller of epoch {f.whole('epoch')} gives no leases: neither run directory nor Slurm confirms its job"
    ),
    "resumed": lambda f: f"controller of epoch {f.whole('epoch')} gives leases again",
    "lease_ended": lambda f: f"{f.text('node', '?')} has heard no controller for too long: its ranks are stopped",
    "device_evicted": lambda f: (
        f"{f.text('node', '?')}: GPU {f.text('device', '?')} {'is' if f.data.get('acted', True) else 'would be'} out "
        f"of use ({f.text('check')}: {f.text('evidence')}); {f.whole('slots')} of {plural(f.whole('of'), 'rank')} left"
    ),
    "devices_unclear": lambda f: f"the GPUs of {f.text('node', '?')} could not all be looked at: {f.text('reason')}",
    "spawner_ready": lambda f: f"{f.text('node', '?')} is ready to fork ranks after {seconds(f.number('seconds'))}",
    "spawner_died": lambda f: f"the process that forks ranks on {f.text('node', '?')} died: {exit_words(f)}",
    "replicator_died": lambda f: f"the replicator on {f.text('node', '?')} died; a new one is started",
    "disk_giver_died": lambda f: (
        f"the process that lets other nodes read the disk of {f.text('node', '?')} died; a new one is started"
    ),
    "local": lambda f: (
        f"{f.text('node', '?')} has step {f.whole('step')} on its own disk "
        f"({(f.number('size_bytes') or 0) / 1e6:.3g} MB in {seconds(f.number('seconds'))})"
    ),
    "local_failed": lambda f: f"{f.text('node', '?')} has no copy of step {f.whole('step')}: {f.text('error')}",
    "copied": lambda f: (
        f"{f.text('node', '?')} keeps a copy of step {f.whole('step')} of its partner "
        f"({(f.number('size_bytes') or 0) / 1e6:.3g} MB in {seconds(f.number('seconds'))}{read_by(f.text('by'))})"
    ),
    "copy_failed": lambda f: f"{f.text('node', '?')} has no copy of step {f.whole('step')}: {f.text('error')}",
    "last_step": _last_step,
    "checkpoint_ordered": lambda f: (
        f"{f.text('by') or 'a user'} orders a checkpoint; the ranks are at step {f.whole('step')}"
    ),
    "checkpoint_made": _checkpoint_made,
    "drill": drill,
    "fetched": lambda f: (
        f"{f.text('node', '?')} has fetched what its ranks restore "
        f"({(f.number('size_bytes') or 0) / 1e6:.3g} MB in {seconds(f.number('seconds'))}{read_by(f.text('by'))})"
    ),
    "commit_late": lambda f: (
        f"step {f.whole('step')} of round {f.whole('round')} was committed when a later round had gone on without it"
    ),
    "read_ahead": lambda f: (
        f"{f.text('node', '?')} does not read step {f.whole('step')} ahead: {f.text('why_not')}"
        if f.text("why_not")
        else f"{f.text('node', '?')} reads step {f.whole('step')} ahead of its ranks "
        f"({(f.number('size_bytes') or 0) / 1e6:.3g} MB)"
    ),
    "forgiven": lambda f: (
        f"{plural(f.whole('restarts'), 'restart')} no longer count: {seconds(f.number('quiet_s'))} without a failure"
    ),
    "helper_stopped": lambda f: (
        f"{f.text('node', 'the launcher')}: its helper process {f.text('helper')} ({f.data.get('pid')}) was stopped "
        f"from outside: {f.text('action')}"
    ),
    "exit_overdue": lambda f: late_end(f, "finished", "is its script still at work, or does it hang?"),
    "end_forced": lambda f: late_end(f, "failed", "it is killed"),
    "saver_died": lambda f: f"the saver on {f.text('node', '?')} died; a new one is started",
    "store_died": lambda f: f"the rendezvous store on {f.text('node', '?')} died: {f.text('error')}",
    "ranks_stopped": lambda f: f"ranks on {f.text('node', '?')} stopped in {seconds(f.number('seconds'))}",
    "left_running": lambda f: (
        f"the ranks on {f.text('node', '?')} leave {plural(_length(f, 'pids'), 'process')} running: {_pids(f)}"
    ),
    "stop_failed": lambda f: f"processes on {f.text('node', '?')} outlived SIGKILL",
    "error_file_ignored": lambda f: f"{f.text('node', '?')}: {f.text('reason')}",
    # the controller
    "informed": lambda f: f"found {plural(_length(f, 'committed'), 'committed checkpoint')} in the run directory",
    "agent_joined": lambda f: f"agent of {f.text('node', '?')} joined",
    "voters": lambda f: f"{plural(len(f.texts('nodes')), 'node')} may vote: {names(f.texts('nodes'))}",
    "uninformed": lambda f: "the run directory does not answer: going on with what the agents know",
    "leaving": lambda f: f"{f.text('node', '?')} leaves within {seconds(f.number('within_s'))}: its own job ends",
    "node_returned": lambda f: f"{f.text('node', '?')} is back, after {plural(f.whole('losses'), 'loss')}",
    "regroup": lambda f: f"a round of other nodes follows: {f.text('reason')}",
    "agent_left": lambda f: f"agent of {f.text('node', '?')} left: {f.text('reason')}",
    "node_lost": lambda f: f"node {f.text('node', '?')} lost: silent for {seconds(f.number('silent_s'))}",
    "waiting": _waiting,
    "round": lambda f: (
        f"round {f.whole('round')}: {plural(f.whole('world_size'), 'rank')} on {names(f.texts('members'))}"
    ),
    "start": _start,
    "ranks": lambda f: (
        f"round {f.whole('round')}: {plural(len(f.inner('pids').data), 'process')} on {f.text('node', '?')}"
        + (f", {kept} of them as before" if (kept := f.whole("kept")) else "")
    ),
    "ranks_left": lambda f: (
        f"round {f.whole('round')} on {f.text('node', '?')}: {f.whole('kept')} of "
        f"{plural(f.whole('of'), 'process')} left it and wait for the next one, after {seconds(f.number('seconds'))}"
    ),
    "ranks_started": lambda f: (
        f"round {f.whole('round')}: ranks on {f.text('node', '?')} run after {seconds(f.number('seconds'))}"
    ),
    "first_step": _first_step,
    "rank_failed": rank_failed,
    "first_failure": rank_failed,
    "echoes": _echoes,
    "origin": _origin,
    "rank_restarted": lambda f: (
        f"rank {f.whole('rank')} on {f.text('node', '?')} runs again after {seconds(f.number('seconds'))}: "
        f"{plural(f.whole('restarts'), 'restart')} of it in round {f.whole('round')}"
    ),
    "restarts_all": lambda f: f"the whole round starts again, in spite of --restart-policy failed: {f.text('reason')}",
    "stopped_rank_failed": lambda f: f"{rank_failed(f)} (its round was being stopped: no failure)",
    "decision": _decision,
    "recovered": _recovered,
    "slow_start": lambda f: (
        f"round {f.whole('round')} did not come up within {seconds(f.number('waited_s'))}: once more"
    ),
    "committed": _committed,
    "persist_failed": lambda f: (
        f"checkpoint of step {f.whole('step')} could not be written on {f.text('node', '?')}: {f.text('error')}"
    ),
    "space_short": lambda f: f"room for checkpoints runs out: {f.text('why')} (keep fewer steps, or make room)",
    "replicas_differ": lambda f: (
        f"layout=REPLICATED, but {f.text('place')} differs from that of rank 0: each rank's own is saved and restored; "
        "where ranks are meant to hold different tensors (FSDP, ZeRO, experts), leave layout=REPLICATED away"
    ),
    "save_overdue": lambda f: (
        f"checkpoint of step {f.whole('step')} is on its way to disk for {seconds(f.number('waited_s'))}, "
        f"{names(f.texts('nodes'))} still at it: is that file system slow, or does it hang? Training goes on"
    ),
    "save_resumed": lambda f: (
        f"checkpoint of step {f.whole('step')} is committed: saves go on again after {seconds(f.number('waited_s'))}"
    ),
    "last_save": lambda f: f"all ranks have ended; the checkpoint of step {f.whole('step')} is still being written",
    "warned": _warned,
    "time_limit_near": lambda f: "the job's time limit is near",
    **HANG_EVENTS,
    **SLOW_EVENTS,
    "stopping": lambda f: f"stopping at the next step that all ranks agree on: {_reason(f)}",
    "stop_agreed": lambda f: f"all ranks stop after step {f.whole('step')}",
    "stop_overdue": lambda f: f"stopping took too long, ranks are killed: {_reason(f)}",
    "verdict": _verdict,
}  # fmt: skip


KINDS = frozenset(_TABLE)


def _pids(f: Fields) -> str:
    pids = f.data.get("pids")
    return names([str(pid) for pid in pids]) if isinstance(pids, list) and pids else "?"


def _length(f: Fields, name: str) -> int | None:
    value = f.data.get(name)
    return len(value) if isinstance(value, list) else None
