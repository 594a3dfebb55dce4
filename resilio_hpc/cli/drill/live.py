"""``resilio drill run NAME… --run RUN``: drills of a live run of one's own."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import resilio_hpc
from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.confirm import confirmed
from resilio_hpc.cli.common.given_order import GivenOrder
from resilio_hpc.core import terminal
from resilio_hpc.core.errors import ResilioError, UsageError
from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.drills import live
from resilio_hpc.drills.drill_words import drill_of
from resilio_hpc.drills.evidence import new_folder, write_record
from resilio_hpc.drills.live import LivePlan, LiveResult
from resilio_hpc.launch.rundir.run_claim import job_of
from resilio_hpc.report.chain.why import read_why
from resilio_hpc.report.overview import Overview, RunReader
from resilio_hpc.slurm.client.command_client import CommandClient

RECOVERS_S = 1800.0  # at most: a hang may take its limit to be found
GOES_ON_S = 120.0
COMPARES_S = 120.0
BEFORE_S = 60.0  # of the ledger, kept as evidence
LOOK_S = 0.5
Found = TypeVar("Found")


def main(options: argparse.Namespace) -> int:
    """Do the drills, one after the other. Exit code 0 when all passed. Raises UsageError, ResilioError."""
    options.run, run = None, run_argument.directory_of(argparse.Namespace(run=options.run))
    drills = [drill_of(name) for name in options.names]
    reader = RunReader(run)
    draw = random.Random()
    results: list[LiveResult] = []
    for number, drill in enumerate(drills):
        overview = _trains(reader, run, options.force, waits=number > 0)
        assert overview.status is not None
        one = live.plan(drill, overview.status, None if options.rank is None else int(options.rank), draw)
        if not options.json or not options.yes:
            print(_what(overview, one), file=sys.stderr if options.json else sys.stdout, flush=True)
        if options.dry_run:
            continue
        if not confirmed("do it?", options.yes):
            return 1
        result = _do(run, reader, overview, one, options.force)
        folder = _keep(run, options.evidence.absolute(), result)
        results.append(result)
        if options.json:
            found = {**asdict(result), "run_dir": str(run), "evidence": str(folder)}
            print(json.dumps(found), file=terminal.raw(sys.stdout), flush=True)
        else:
            print(f"{line(result)}; evidence {folder}", flush=True)
        if not result.passed:
            break
    return 0 if all(result.passed for result in results) else 1


def _trains(reader: RunReader, run: Path, force: bool, waits: bool) -> Overview:
    """Return the run now. Raises UsageError where no drill may be done to it."""
    deadline = time.monotonic() + (GOES_ON_S if waits else 0.0)
    while True:
        overview = reader.overview(time.time())
        why = live.refusal(overview, run.stat().st_uid, os.geteuid(), force)
        if not why:
            break
        if time.monotonic() >= deadline:
            raise UsageError(f"refused: {why}")
        time.sleep(LOOK_S)
    _check_job(overview.job)
    return overview


def _check_job(job: str) -> None:
    """Raise UsageError where the job is another user's, as Slurm says. A run without Slurm has no other owner."""
    if not job or job.startswith("local-"):
        return
    found = next(iter(CommandClient().jobs((job_of(job),))), None)
    if found is None:
        raise UsageError(f"refused: Slurm knows no job {job} that runs")
    if found.user_id is not None and found.user_id != os.geteuid():
        raise UsageError(f"refused: job {job} is of user {found.user or found.user_id}, not yours")


def _what(overview: Overview, one: LivePlan) -> str:
    status = overview.status
    assert status is not None
    committed = f"step {status.committed} is committed" if status.committed is not None else "no step is committed"
    return (
        f"run {overview.run_id} in {overview.path}: job {overview.job}, {status.world_size} ranks, "
        f"at step {status.step}, {committed}\n"
        f"{one.drill}: {one.text}. The run's own agents do it; ranks go on from the newest step that all can restore."
    )


def _do(run: Path, reader: RunReader, overview: Overview, one: LivePlan, force: bool) -> LiveResult:
    status = overview.status
    assert status is not None
    order = GivenOrder(run, "drill", fault=one.fault, rank=one.rank, force=force)
    done: Event | None = None
    while done is None:
        done = live.struck(order.look(), order.mark)
    if done.fields.get("why"):
        raise UsageError(f"refused by the run: {done.fields['why']}")

    def since(at: float) -> list[Event]:
        return [event for event in reader.overview(time.time()).events if event.time >= at]

    end = _until(lambda: live.over(since(done.time)), RECOVERS_S)
    state, step, world = live.NOT_COMPARED, None, status.world_size
    before = done.fields.get("step")
    if end is not None and end.kind != "verdict":
        step = _until(lambda: _beyond(reader, before), GOES_ON_S)
        now = reader.overview(time.time())
        world = now.status.world_size if now.status is not None else 0
        if live.compares(now.events):
            recovered = end.time
            state = _until(lambda: live.compared(since(recovered)), COMPARES_S) or live.NOT_COMPARED
    return live.result_of(one, done.time, end, state, (status.world_size, world), step, before)


def _beyond(reader: RunReader, before: int | None) -> int | None:
    status = reader.overview(time.time()).status
    step = status.step if status is not None else None
    return step if step is not None and (before is None or step > before) else None


def _until(look: Callable[[], Found | None], limit_s: float) -> Found | None:
    """Return what ``look`` finds, None where it finds nothing in time."""
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline:
            return None
        time.sleep(LOOK_S)
    return found


def _keep(run: Path, parent: Path, result: LiveResult) -> Path:
    """Write the record, and the ledger's lines of that time. Return the folder."""
    folder = new_folder(parent, result.name)
    lines = [event for event in read_ledger(run / "ledger") if event.time >= result.time - BEFORE_S]
    try:
        why = read_why(run, time.time()).text
    except ResilioError as error:
        why = str(error)
    record = {**asdict(result), "run_dir": str(run), "version": resilio_hpc.__version__, "why_text": why}
    write_record(folder, record)
    (folder / "ledger.jsonl").write_text("".join(map(_line, lines)))
    return folder


def _line(event: Event) -> str:
    return json.dumps({"t": event.time, "writer": event.writer, "event": event.kind, "fields": event.fields}) + "\n"


def line(result: LiveResult) -> str:
    """Return what a drill came to, in a line."""
    verdict = "passed" if result.passed else f"FAILED: {result.why}"
    recovery = f"recovered after {result.recovery_s:.2f} s" if result.recovery_s is not None else "no recovery"
    again = "steps unknown" if result.repeated_steps is None else f"{result.repeated_steps} steps done again"
    on = f"; at step {result.went_on_to} now" if result.went_on_to is not None else ""
    return f"{result.name}: {verdict}; {recovery}; {again}{on}; state {result.state}"
