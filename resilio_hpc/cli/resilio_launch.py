"""``resilio-launch``: parse the command, check it, and start the supervisor.

Nothing heavy (torch, numpy, zmq, msgspec) is imported before the checks are over, so a mistake is answered at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from resilio_hpc.core import standard_streams
from resilio_hpc.core.errors import ResilioError, UsageError, os_error_text
from resilio_hpc.core.terminal import guarded, raw
from resilio_hpc.launch.cli import checks
from resilio_hpc.launch.cli.option_values import Caller
from resilio_hpc.launch.cli.options_parser import parse, parse_join
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.gpus import devices

if TYPE_CHECKING:
    from resilio_hpc.launch.rundir.notify_targets import Target


def main(argv: Sequence[str] | None = None, supervise: Callable[[LaunchOptions], int] | None = None) -> int:
    """Run a launch and return the exit code.

    It is the run's, as ``supervise`` (default: the supervisor) returns it; 2 after a mistake of the user; 130 when
    interrupted.
    """
    if argv is None:
        standard_streams.make_usable()
    output = raw(sys.stdout)
    if isinstance(output, io.TextIOWrapper):
        output.reconfigure(errors="replace")  # --help and --dry-run in a locale without UTF-8
    with guarded():
        return _carry_out(sys.argv[1:] if argv is None else argv, supervise)


def _carry_out(argv: Sequence[str], supervise: Callable[[LaunchOptions], int] | None) -> int:
    try:
        return _launch(argv, supervise)
    except ResilioError as error:
        print(f"resilio-launch: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # resilio-launch --dry-run | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:  # an unreadable file, a full disk, no descriptor left
        print(f"resilio-launch: error: {os_error_text(error, 'this launch')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:  # --help, --version
        return end.code if isinstance(end.code, int) else 0


def _launch(argv: Sequence[str], supervise: Callable[[LaunchOptions], int] | None) -> int:
    caller = _caller()
    request = parse_join(argv, caller)
    if request is not None:
        from resilio_hpc.launch.supervisor import joiner

        return joiner.run(request)
    parsed = parse(argv, caller)
    here = devices.read_devices(caller.environment)
    notes = parsed.notes + checks.check(parsed.options, caller.environment, caller.cwd, here)
    for note in notes:
        print(f"resilio-launch: note: {note}", file=sys.stderr)
    if parsed.options.resizing.resize_options:
        from resilio_hpc.cli import resize

        resize.check_words(parsed.options.resizing.resize_options)
    targets = _notify_targets(parsed.options, caller)
    from resilio_hpc.launch.chain import run_choice

    options = run_choice.choose(
        run_choice.LaunchRequest(parsed.options, parsed.run_dir_given, caller.environment),
        create=not parsed.options.dry_run,
    )
    if options.dry_run:
        return _dry_run(options, caller, here, tuple(target.name for target in targets))
    from resilio_hpc.launch.rundir import checkpoint_link, run_directory
    from resilio_hpc.launch.supervisor import supervisor

    if options.checkpoints.checkpoint_dir:
        checkpoint_link.link(Path(options.run_dir), options.checkpoints.checkpoint_dir)
    run = run_directory.open_run(Path(options.run_dir), program=options.program)
    supervise = supervise or partial(supervisor.run, targets=targets, at_end=_keep_summary)
    # without targets, since the options are on the agents' command lines
    return supervise(replace(options, run_dir=str(run.path), notify=()))


def _keep_summary(run_path: Path) -> None:
    from resilio_hpc.report import summary

    with contextlib.suppress(OSError, ResilioError):  # a summary saves later readers time, and nothing more
        summary.keep(run_path)


def _notify_targets(options: LaunchOptions, caller: Caller) -> tuple[Target, ...]:
    if not options.notify:
        return ()
    from resilio_hpc.launch.rundir import notify_targets

    targets = notify_targets.read_targets(options.notify, caller.cwd)
    if checks.runs_here(options, caller.environment):
        notify_targets.check_targets(targets, caller.cwd)
    return targets


def _caller() -> Caller:
    try:
        cwd = Path.cwd()
    except OSError as error:
        raise UsageError(f"the current directory is gone ({error.strerror}): cd into one that exists") from None
    return Caller(dict(os.environ), cwd, time.time(), os.getpid())


def _dry_run(options: LaunchOptions, caller: Caller, here: devices.NodeDevices, notified: tuple[str, ...]) -> int:
    from resilio_hpc.launch.cli import dry_run

    plan = dry_run.plan(options, caller.environment, here, checks.runs_here(options, caller.environment), notified)
    print(dry_run.as_json(plan) if options.json else dry_run.as_text(plan), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
