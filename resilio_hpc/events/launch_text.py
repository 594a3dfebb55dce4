"""What a launch records about its jobs, its chain and its size, as text: rows of ``event_text``'s table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.events.failure_text import signal_name
from resilio_hpc.events.memory_text import size
from resilio_hpc.events.phrases import amount, names, plural, seconds


def verdict_of(f: Fields) -> str:
    """Return the verdict that an event names, in words."""
    return f.text("verdict", "unknown").replace("_", " ")


def _signal(f: Fields) -> str:
    name = f.text("signal", "?").removeprefix("SIG")
    return f"SIG{name} arrived{', passed on to the agents' if f.text('to') else ' on ' + f.text('node', '?')}"


def _launch(f: Fields) -> str:
    where = {"local": "on this machine", "batch": "in a batch job", "step": "in a job step"}.get(f.text("mode"), "")
    return f"job {f.text('job', '?')} starts {where}, link {f.whole('link')}: {names(f.texts('nodes'))}"


def _logged(f: Fields) -> str:
    values = f.inner("values")
    said = [f"{name} {value:.4g}" for name in values.data if (value := values.number(name)) is not None]
    span = f.number("seconds") or 0.0
    for name in f.inner("sums").data if span > 0 else ():
        said.append(f"{amount((f.inner('sums').number(name) or 0.0) / span)} {name}/s")
    said += [f"{name} is not a finite number" for name in f.texts("not_finite")]
    return f"step {f.whole('step')}: {', '.join(said) or 'nothing'}"


def _placed(f: Fields) -> str:
    places = f.data.get("places")
    told = [f"{node} takes place {place}" for node, place in places.items()] if isinstance(places, dict) else []
    more = (f.whole("count") or 0) - len(told)
    whose = "its disk has" if len(told) == 1 else "their disks have"
    return f"{', '.join(told)}{f' and {more} more' if more > 0 else ''}: {whose} step {f.whole('step')} of those ranks"


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


def _tested(f: Fields) -> str:
    outcome, why = f.text("outcome"), f.text("why")
    if outcome in ("not_possible", "interrupted", "failed"):
        return f"test of the nodes {outcome.replace('_', ' ')}: {why}"
    named = [f"{word}: {names(f.texts(word))}" for word in ("bad", "slow") if f.texts(word)]
    evidence = f.data.get("evidence")
    told = [str(text) for text in evidence.values()] if isinstance(evidence, dict) else []
    found = ", ".join(named) + (f" ({told[0]})" if len(told) == 1 else "")
    replaced = f"; going on without {names(f.texts('replaced'))}" if f.texts("replaced") else ""
    count, rounds = plural(f.whole("nodes"), "node"), plural(f.whole("rounds"), "round")
    took = seconds(f.number("seconds"))
    return f"test of {count} in {rounds}, {took}: {found or why or 'nothing found'}{replaced}"


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


def _layout(f: Fields) -> str:
    before = f.inner("before")
    was = f"; before: {_degrees(before)}" if before.data else ""
    return f"layout of round {f.whole('round')}: {_degrees(f)}{was} ({f.text('why')})"


def _degrees(f: Fields) -> str:
    on = f" on {plural(f.whole('ranks'), 'GPU')}" + (f" of type {f.text('gpu')}" if f.text("gpu") else "")
    degrees = ", ".join(f"{name}={f.whole(name)}" for name in ("tp", "pp", "dp"))
    return f"{degrees}, micro-batch {f.whole('micro_batch')}{on}"


def _layouts_planned(f: Fields) -> str:
    if f.text("failed"):
        return f"no layouts were planned: {f.text('failed')}"
    gpus = f" on {names(f.texts('gpus'))}" if any(f.texts("gpus")) else ""
    return f"layouts planned for {plural(f.whole('sizes'), 'number')} of ranks{gpus} in {seconds(f.number('seconds'))}"


def _because(f: Fields) -> str:
    return f": {f.text('why')}" if f.text("why") else ""


def _code(f: Fields) -> str:
    code = f.whole("exit_code")
    return signal_name(-code) if code is not None and code < 0 else f"exit code {code}"


def _predecessor(f: Fields) -> str:
    return verdict_of(f) if f.text("verdict") else f"no verdict, Slurm says {f.text('state') or 'nothing'}"


LAUNCH_EVENTS: Mapping[str, Callable[[Fields], str]] = {
    "standby_ready": lambda f: (
        f"a standby process on {f.text('node', '?')} waits for a place after {seconds(f.number('seconds'))}"
    ),
    "standby_used": lambda f: (
        f"a standby process on {f.text('node', '?')} is rank {f.whole('rank')} now"
        + (f", restored in {seconds(f.number('restored_s'))}" if "restored_s" in f.data else "")
    ),
    "process_image": lambda f: (
        f"a standby process on {f.text('node', '?')} waits as an image of {size(f.number('bytes') or 0.0)} after "
        f"{seconds(f.number('seconds'))}"
    ),
    "process_image_failed": lambda f: (
        f"a standby process on {f.text('node', '?')} could not be {f.text('what')}: {f.text('reason')}; "
        "from here on they wait in memory"
    ),
    "standby_lost": lambda f: (
        f"a standby process on {f.text('node', '?')} has ended: {f.text('reason')}"
        + (f"; there are no more of them (output: {f.text('log')})" if f.data.get("for_good") is True else "")
    ),
    "launch": _launch,
    "placed": _placed,
    "steps_planned": lambda f: f"ranks of round {f.whole('round')} do steps {f.whole('start')} to {f.whole('total')}",
    "logged": _logged,
    "pace": lambda f: f"{plural(f.whole('steps'), 'step')} to {f.whole('step')}: {seconds(f.number('step_s'))} each",
    "launch_ends": lambda f: f"launch ends: {verdict_of(f)}, exit code {f.whole('exit_code')}",
    "agent_ended": lambda f: f"agent of {f.text('node', '?')} ended with {_code(f)} after start {f.whole('starts')}",
    "launch_failed": lambda f: (
        f"srun could not start the agent of {f.text('node', '?')} ({_code(f)}, start {f.whole('starts')}): tried again"
    ),
    "own_srun": lambda f: f"{f.text('node', '?')} gets an srun of its own",
    "end_time": lambda f: f"Slurm has moved the end of job {f.text('job', '?')}",
    "joins": lambda f: f"{names(f.texts('nodes'))} of job {f.text('job', '?')} join the run's part {f.text('part')}",
    "joiner_ends": lambda f: f"joining job ends with exit code {f.whole('exit_code')}",
    "nodes_checked": _nodes_checked,
    "test_begun": lambda f: f"probers start on {plural(f.whole('nodes'), 'node')} for a test: {f.text('reason')}",
    "paused": lambda f: f"all ranks pause after step {f.whole('step')} for a test of the nodes",
    "tested": _tested,
    "pause_ended": lambda f: (
        f"ranks go on after {seconds(f.number('seconds'))}{': ' + f.text('why') if f.text('why') else ''}"
    ),
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
    "layout": _layout,
    "layouts_planned": _layouts_planned,
    "notify_failed": lambda f: f"{f.text('target', '?')} could not be told: {f.text('error')}",
}  # fmt: skip
