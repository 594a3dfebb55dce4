"""The agent's child for all work on the shared file system: if that hangs, the child is killed and training goes on.

The child copies the node's spool (ledger and logs, which are written locally first) to the run directory, and answers
requests: scan and claim epochs, write verdicts and status, list committed steps. Requests and answers are JSON lines on
its standard input and output. ``storage`` is the agent's side.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import to_builtins

from resilio_hpc.core import process_title, trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import ResilioError, Untrusted
from resilio_hpc.core.json_fields import Fields, parse_object
from resilio_hpc.core.terminal import plain
from resilio_hpc.launch.process.process_tree import die_with_parent, outlive_warnings
from resilio_hpc.launch.protocol.vote import EpochRecord
from resilio_hpc.launch.rundir import chain_order, limit_files, notify_targets, run_directory, time_limit, user_orders
from resilio_hpc.launch.rundir.holder import Pulse, pulse_file
from resilio_hpc.launch.rundir.log_spool import Drain

DRAIN_INTERVAL_S = 0.2
LOOK_S = 2.0  # seconds between two looks for the run directory
GONE_S = 3.0  # missing for so long, it is gone; a renamed parent may be put back sooner


def main() -> int:
    """Serve requests and drain the spool until standard input ends; the child's main function."""
    run_path, spool, job, parent = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    presence = DirectoryPresence(run_path, sys.argv[5])
    process_title.show("io_worker")
    die_with_parent(parent)
    outlive_warnings()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm may send it to the whole step; the agent decides
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # a process opens a file of the spool just when it is removed
    drain = Drain(spool, run_path)
    pulse: Pulse | None = None
    buffer = b""
    next_drain = 0.0
    said = ""
    while True:
        ready, _, _ = select.select([0], [], [], DRAIN_INTERVAL_S)
        data = os.read(0, 1 << 16) if ready else None
        if data == b"":
            with contextlib.suppress(OSError):
                if pulse is not None:
                    pulse.end()
            return 1 if drain.run() else 0
        *lines, buffer = (buffer + (data or b"")).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["op"] == "show_life":
                pulse = Pulse(pulse_file(run_path, request["turn"]))
                continue
            if presence.is_gone(time.monotonic()):
                reply = {"id": request["id"], "error": f"{run_path} was removed", "gone": True}
            else:
                reply = _serve(request, run_path, job)
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # the file system fails, so others may take the run for abandoned
            if pulse is not None:
                pulse.tick(time.monotonic())
        if time.monotonic() >= next_drain:
            problem = drain.run()
            if problem and problem != said:
                print(f"resilio-launch: cannot copy logs to the run directory yet: {plain(problem)}", file=sys.stderr)
            said = problem
            next_drain = time.monotonic() + DRAIN_INTERVAL_S


class DirectoryPresence:
    """Looks now and then whether the run directory still exists. One that fails or hangs still exists."""

    def __init__(self, run_path: Path, run_id: str, gone_s: float = GONE_S) -> None:
        self._run_path, self._run_id, self._gone_s = run_path, run_id, gone_s
        self._looked = float("-inf")
        self._missing_since: float | None = None

    def is_gone(self, now: float) -> bool:
        """Return whether the run directory was removed. ``now``: monotonic seconds."""
        if now - self._looked >= LOOK_S:
            self._looked = now
            missing = self._run_id and self._is_missing()
            self._missing_since = (now if self._missing_since is None else self._missing_since) if missing else None
        return self._missing_since is not None and now - self._missing_since >= self._gone_s

    def _is_missing(self) -> bool:
        try:
            text = (self._run_path / "run.json").read_text()
        except FileNotFoundError:
            return True
        except (OSError, ValueError):
            return False
        found = Fields.of(parse_object(text)).text("run_id")
        return bool(found) and found != self._run_id


def _serve(request: dict[str, Any], run_path: Path, job: str) -> dict[str, Any]:
    reply: dict[str, Any] = {"id": request["id"]}
    try:
        operation = request["op"]
        if operation in LOOKS:
            return reply | LOOKS[operation](request, run_path, job)
        record = run_directory.newest_epoch(run_path)
        reply["epoch"] = record.epoch if record else 0
        if operation == "scan":
            reply["record"] = to_builtins(record) if record else None
            reply["pulse"] = run_directory.read_pulse(run_path, record.epoch) if record else None
            reply["verdict"] = _verdict(run_path, job)
        elif operation == "claim":
            reply["won"] = _claim(run_path, EpochRecord(**request["record"]))
        elif operation == "witness":
            reply["holder"] = run_directory.claim_witness(run_path, job, request["witness"], request["node"])
        elif operation == "verdict":
            leads = reply["epoch"] <= request["verdict"].get("epoch", 1 << 60)  # otherwise another agent leads the run
            if leads and run_directory.read_verdict(run_path, job) is None:  # the first verdict of a part stands
                run_directory.write_verdict(run_path, job, request["verdict"])
            reply["verdict"] = _verdict(run_path, job)
        elif operation == "status":
            if reply["epoch"] <= request["status"]["epoch"]:
                write_atomic(run_path / "status.json", json.dumps(request["status"]).encode(), durable=False)
            reply["end_time"] = time_limit.read_end_time(run_path, job)
            reply |= {"limit_order": _believed(limit_files.read_order, run_path)}
            reply["orders"] = {
                kind: _believed(lambda path, kind=kind: user_orders.read_raw(path, kind), run_path)  # type: ignore[misc]
                for kind in user_orders.KINDS
            }
        elif operation == "keep_limits":
            kept = limit_files.parse(request["limits"], limit_files.KeptLimits)
            if reply["epoch"] <= kept.epoch:
                limit_files.write_kept(run_path, kept)
        elif operation == "take_order":
            reply["taken"] = user_orders.remove(run_path, request["kind"], request["mark"])
        elif operation == "end_time":
            reply["end_time"] = time_limit.read_end_time(run_path, request["job"])
        elif operation == "past":
            reply |= _past(run_path, job)
        else:
            reply["error"] = f"unknown request {operation}"
    except (OSError, ValueError, KeyError, ResilioError) as error:
        reply["error"] = str(error)
        if isinstance(error, Untrusted):
            _warn_once(f"not believed: {error}")
    return reply


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        print(f"resilio-launch: {plain(text)}", file=sys.stderr)


def _look(_request: dict[str, Any], run_path: Path, job: str) -> dict[str, Any]:
    """Return what a supervisor needs at every look."""
    return {
        "ended": run_directory.read_verdict(run_path, job),
        "status": trusted_files.read_object(run_path / "status.json"),
        "order": chain_order.read_raw(run_path),
    }


def _believed(read: Callable[[Path], object], run_path: Path) -> dict[str, Any]:
    """Return what a file of orders or limits says; nothing where it is not believed: the run must not depend on it."""
    try:
        return msgspec.to_builtins(read(run_path))  # type: ignore[no-any-return]
    except Untrusted as error:
        _warn_once(f"not believed: {error}")
        return {}


def _move_end(request: dict[str, Any], run_path: Path, _job: str) -> dict[str, Any]:
    time_limit.write_end_time(run_path, request["job"], request["end_time"])
    return {}


def _targets(_request: dict[str, Any], run_path: Path, _job: str) -> dict[str, Any]:
    return {"targets": [target.text for target in notify_targets.kept(run_path)]}


# Requests that concern no epoch.
LOOKS = {"look": _look, "move_end": _move_end, "targets": _targets}


def _claim(run_path: Path, record: EpochRecord) -> bool:
    """Create the epoch's file, and refuse commits of older epochs from now on."""
    from resilio_hpc.ckpt.store.fence import raise_fence

    won = run_directory.claim_epoch(run_path, record)
    if won:
        raise_fence(run_path / "checkpoints", record.epoch)
    return won


def _past(run_path: Path, job: str) -> dict[str, Any]:
    from resilio_hpc.ckpt.store import checkpoint_index  # imported here, so that the child starts fast

    return {
        "steps": checkpoint_index.committed_steps(run_path / "checkpoints"),
        "last_round": run_directory.last_round(run_path),
        "verdict": _verdict(run_path, job),
        "limits": _believed(limit_files.read_kept, run_path),
        "limit_order": _believed(limit_files.read_order, run_path),
    }


def _verdict(run_path: Path, job: str) -> list[Any] | None:
    """Return name and exit code of the verdict of a job's part; None without one."""
    f = Fields.of(run_directory.read_verdict(run_path, job))
    code = f.whole("exit_code")
    return [f.text("verdict"), 1 if code is None else code] if f.text("verdict") else None


if __name__ == "__main__":
    sys.exit(main())
