"""Ledger entries as text: one line for a person about each kind of event. Pure, and safe for any fields.

There is one table for the launcher's console, ``resilio ledger`` and the live view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.events.failure_text import exit_words, rank_failed, signal_name
from resilio_hpc.events.rungs import rung_words

MAX_NAMES = 4

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
}


def words(kind: str, fields: Mapping[str, Any]) -> str:
    """Return one line about an event. Kinds that are not in the table show their fields."""
    f = Fields(fields)
    tell = _TABLE.get(kind)
    return printable(tell(f) if tell else _anything(f), 300)


def names(all_names: Sequence[str]) -> str:
    """Return ``n1, n2``; of many the first few, and how many more."""
    shown = ", ".join(all_names[:MAX_NAMES])
    more = len(all_names) - MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown or "no node"


def plural(count: int | None, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{'?' if count is None else count} {noun}{ending}"


def seconds(value: float | None) -> str:
    """Return a duration with two or three significant digits.

    ``0.07 s``, ``12.5 s``, ``3 min 20 s``, ``2 h 05 min``.
    """
    if value is None:
        return "? s"
    if value < 10:
        return f"{value:.2f} s"
    if value < 100:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value) // 60} min {int(value) % 60:02d} s"
    return f"{int(value) // 3600} h {int(value) % 3600 // 60:02d} min"


def restored(source: str, step: int | None) -> str:
    """Return where ranks go on: ``step 40 from memory``, ``step 40 from the committed checkpoint``."""
    places = {
        "memory": "memory", "local": "the nodes' own disks", "peer": "each other's disks",
        "committed": "the committed checkpoint",
    }  # fmt: skip
    place = places.get(source, source)
    return f"step {step} from {place}" if place else f"step {step}"


def _anything(f: Fields) -> str:
    shown = {name: value for name, value in f.data.items() if name != "v" and value not in (None, "")}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _echoes(f: Fields) -> str:
    cause = f.text("node", "?") if f.whole("rank") is None else f"rank {f.whole('rank')} on {f.text('node', '?')}"
    place = f"; tracebacks: {f.text('logs')}/{f.whole('round')}" if f.text("logs") else ""
    if f.data.get("echo"):
        return f"{plural(f.whole('count'), 'other rank')} lost a connection, or timed out, like {cause}{place}"
    return f"{plural(f.whole('count'), 'peer')} lost the connection to {cause}{place}"


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
    return f"{f.text('verdict', 'unknown').replace('_', ' ')}: {f.text('reason')}"


def _warned(f: Fields) -> str:
    return f"SIG{f.text('signal', '?')} reached {f.text('node', '?')}: {_reason(f)}"


def _reason(f: Fields) -> str:
    return f.text("reason").replace("_", " ")


def _signal(f: Fields) -> str:
    name = f.text("signal", "?").removeprefix("SIG")
    return f"SIG{name} arrived{', passed on to the agents' if f.text('to') else ' on ' + f.text('node', '?')}"


def _launch(f: Fields) -> str:
    where = {"local": "on this machine", "batch": "in a batch job", "step": "in a job step"}.get(f.text("mode"), "")
    return f"job {f.text('job', '?')} starts {where}, link {f.whole('link')}: {names(f.texts('nodes'))}"


def _nodes_checked(f: Fields) -> str:
    if f.text("no_result"):
        return f"pair check without a result: {f.text('no_result')}"
    parts = [
        f"{word} {names(f.texts(field))}"
        for word, field in (("bad:", "bad"), ("slow:", "slow"), ("left out:", "left_out"))
        if f.texts(field)
    ]
    found = ", ".join(parts) or f.text("why") or "nothing found"
    return f"pair check in {plural(f.whole('rounds'), 'round')}, {seconds(f.number('seconds'))}: {found}"


def _resize(f: Fields) -> str:
    action, jobs = f.text("action", "?"), names(f.texts("jobs"))
    what = {
        "grow": f"grow to {plural(f.whole('nodes'), 'node')} by jobs {jobs}",
        "shrink": f"shrink to {plural(f.whole('nodes'), 'node')}, jobs {jobs} leave",
        "end": f"end jobs {jobs}",
        "withdraw": f"withdraw jobs {jobs}",
        "reshape": f"next job {jobs} gets another size: {f.data.get('sizes')}",
        "stay": f"stay at {plural(f.whole('nodes'), 'node')}",
    }.get(action, action)
    failed = f"; {f.text('error')}" if f.text("error") else ""
    return f"resize: {what} ({f.text('reason')}){failed}"


_TABLE: dict[str, Callable[[Fields], str]] = {
    # the supervisor
    "launch": _launch,
    "launch_ends": lambda f: f"launch ends: {_reason_of(f, 'verdict')}, exit code {f.whole('exit_code')}",
    "agent_ended": lambda f: f"agent of {f.text('node', '?')} ended with {_code(f)} after start {f.whole('starts')}",
    "launch_failed": lambda f: (
        f"srun could not start the agent of {f.text('node', '?')} ({_code(f)}, start {f.whole('starts')}): tried again"
    ),
    "own_srun": lambda f: f"{f.text('node', '?')} gets an srun of its own",
    "end_time": lambda f: f"Slurm has moved the end of job {f.text('job', '?')}",
    "joins": lambda f: f"{names(f.texts('nodes'))} of job {f.text('job', '?')} join the run's part {f.text('part')}",
    "joiner_ends": lambda f: f"joining job ends with exit code {f.whole('exit_code')}",
    "nodes_checked": _nodes_checked,
    "node_left_job": lambda f: f"node {f.text('node', '?')} has left the job",
    "signal": _signal,
    "predecessor": lambda f: f"job {f.text('job', '?')} before this one: {_predecessor(f)}",
    "successor": lambda f: (
        f"job {f.text('job', '?')} submitted as link {f.whole('link')}"
        if f.data.get("acted", True)
        else f"link {f.whole('link')} would have been submitted (--mode observe)"
    ),
    "excludes": lambda f: (
        f"job {f.text('job', '?')} avoids {names(f.texts('nodes'))}: {f.text('why')}"
        if f.texts("nodes")
        else f"job {f.text('job', '?')} avoids no node any more on our account{_because(f)}"
    ),
    "successor_refused": lambda f: f"no next job could be submitted yet: {f.text('limit')}",
    "requeued_instead": lambda f: f"job {f.text('job', '?')} is requeued, since no next job could be submitted",
    "stayed_for_requeue": lambda f: (
        f"job {f.text('job', '?')} stayed {seconds(f.number('seconds'))} for Slurm to requeue it after its preemption"
    ),
    "waited_for_predecessor": lambda f: (
        f"waited {seconds(f.number('seconds'))} until nothing of {f.text('part', '?')} can train any more"
    ),
    "chain_stopped": lambda f: f"{f.text('by', 'its user')} has stopped the chain: job {f.text('job', '?')} ends",
    "maintenance": lambda f: (
        f"reservation {f.text('reservation', '?')} is in the way of job {f.text('job', '?')}: "
        + ("it waits" if f.number("time_limit_s") is None else f"it may run for {seconds(f.number('time_limit_s'))}")
    ),
    "successor_cancelled": lambda f: f"job {f.text('job', '?')} cancelled: nothing is left for it to do",
    "resize": _resize,
    "notify_failed": lambda f: f"{f.text('target', '?')} could not be told: {f.text('error')}",
    # agents
    "agent": lambda f: f"agent starts on {f.text('node', '?')} with {plural(f.whole('slots'), 'slot')}",
    "agent_ends": lambda f: f"agent on {f.text('node', '?')} ends: {_reason_of(f, 'verdict')}",
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
        f"({(f.number('size_bytes') or 0) / 1e6:.3g} MB in {seconds(f.number('seconds'))})"
    ),
    "copy_failed": lambda f: f"{f.text('node', '?')} has no copy of step {f.whole('step')}: {f.text('error')}",
    "fetched": lambda f: (
        f"{f.text('node', '?')} has fetched what its ranks restore "
        f"({(f.number('size_bytes') or 0) / 1e6:.3g} MB in {seconds(f.number('seconds'))})"
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
    "exit_overdue": lambda f: (
        f"rank {f.whole('rank')} on {f.text('node', '?')} (process {f.whole('pid')}) finished training "
        f"{seconds(f.number('waited_s'))} ago and has not ended: is its script still at work, or does it hang?"
    ),
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
    ),
    "ranks_started": lambda f: (
        f"round {f.whole('round')}: ranks on {f.text('node', '?')} run after {seconds(f.number('seconds'))}"
    ),
    "first_step": _first_step,
    "rank_failed": rank_failed,
    "first_failure": rank_failed,
    "echoes": _echoes,
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
    "stalled": lambda f: (
        f"no step for {seconds(f.number('silent_s'))} since step {f.whole('step')} (expected within "
        f"{seconds(f.number('limit_s'))}); fewest steps: {names(f.texts('nodes'))}"
    ),
    "goes_on": lambda f: f"step {f.whole('step')} is done, after {seconds(f.number('waited_s'))} without one",
    "stopping": lambda f: f"stopping at the next step that all ranks agree on: {_reason(f)}",
    "stop_agreed": lambda f: f"all ranks stop after step {f.whole('step')}",
    "stop_overdue": lambda f: f"stopping took too long, ranks are killed: {_reason(f)}",
    "verdict": _verdict,
}  # fmt: skip


KINDS = frozenset(_TABLE)


def _reason_of(f: Fields, name: str) -> str:
    return f.text(name, "unknown").replace("_", " ")


def _because(f: Fields) -> str:
    return f": {f.text('why')}" if f.text("why") else ""


def _code(f: Fields) -> str:
    code = f.whole("exit_code")
    return signal_name(-code) if code is not None and code < 0 else f"exit code {code}"


def _predecessor(f: Fields) -> str:
    return _reason_of(f, "verdict") if f.text("verdict") else f"no verdict, Slurm says {f.text('state') or 'nothing'}"


def _pids(f: Fields) -> str:
    pids = f.data.get("pids")
    return names([str(pid) for pid in pids]) if isinstance(pids, list) and pids else "?"


def _length(f: Fields, name: str) -> int | None:
    value = f.data.get(name)
    return len(value) if isinstance(value, list) else None
