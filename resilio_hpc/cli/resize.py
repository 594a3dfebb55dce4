"""``resilio resize RUN``: more nodes for a run while they are idle, fewer when other jobs wait for them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from resilio_hpc.autoparallel.base.hardware import Machine
from resilio_hpc.autoparallel.base.known_words import known_framework
from resilio_hpc.autoparallel.model.model_description import uniform
from resilio_hpc.autoparallel.model.presets import find_model
from resilio_hpc.autoparallel.search.frameworks import DEFAULT, machine_and_stack, space_of
from resilio_hpc.autoparallel.search.model_speed import SpeedModel
from resilio_hpc.autoparallel.search.ranking import Training
from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.plan.predict import calibration_of, profile_of
from resilio_hpc.cli.plan.setting import as_measured
from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.process.announce import stamped
from resilio_hpc.launch.resize.facts import ResizeDecision
from resilio_hpc.launch.resize.policy import resize_policy
from resilio_hpc.launch.resize.resizer import Resizer
from resilio_hpc.launch.resize.view import ResizeLimits, ResizeView
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.which_client import which
from resilio_hpc.slurm.submit.joiner_job import render_joiner
from resilio_hpc.slurm.submit.template import normalised

_EXAMPLES = """examples:
  resilio resize runs/large --dry-run                what would be done now, and why
  resilio resize runs/large                          do it, once
  resilio resize runs/large --watch 30 --max-nodes 16
  resilio resize runs/large --watch 30 --observe     for a while, to see what it would do (resilio ledger)
  resilio resize runs/large --watch 30 --model llama3-70b --global-batch 1024    other sizes as the planner sees them
  resilio resize runs/large --watch 30 time=1:00:00 setup=environment.sh     (for the joiners: as resilio submit)

exit codes:
  0 done, or nothing to do (with --watch: the run is over); 1 Slurm refused or gave no answer; 2 a mistake in the line
"""

LEAST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 600.0  # between two looks, while Slurm does not answer


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the examples."""
    options = _parser().parse_intermixed_args(argv)
    if options.launcher:
        process_tree.die_with_parent(options.launcher)
        process_tree.outlive_warnings()
    values, limits = _understood(options)
    policy = resize_policy(options.policy)
    if options.launcher and options.watch is None:
        options.watch = max(LEAST_PAUSE_S, policy.look_s)
    client = CommandClient() if options.watch is None else which(lambda text: _print_error(text, options))
    view = ResizeView(run_argument.run_of(options), client, limits, policy)
    resizer = Resizer(view, client, policy, values, options.dry_run, options.observe)
    try:
        return _once(resizer, options) if options.watch is None else _watch(resizer, view, options)
    finally:
        resizer.close()


def check_words(words: Sequence[str]) -> None:
    """Check the arguments that a launcher passes on to its resizer (``--resize-options``). Raises UsageError."""
    try:
        options = _parser().parse_intermixed_args([".", *words])
        for name in ("watch", "dry_run", "observe", "policy", "json", "launcher"):
            if getattr(options, name):
                raise UsageError(f"--{name.replace('_', '-')} is not for a resizer beside a launch")
        _understood(options)
    except UsageError as error:
        raise UsageError(f"--resize-options: {error}") from None


def _understood(options: argparse.Namespace) -> tuple[dict[str, str], ResizeLimits]:
    """Return the joiners' values, and limits of the run's size. Raises UsageError."""
    values = _values(options.values)
    if options.watch is not None and options.watch < LEAST_PAUSE_S:
        raise UsageError(f"--watch {options.watch:g}: at least {LEAST_PAUSE_S:g} s")
    for name in ("min_nodes", "max_nodes", "global_batch"):
        if getattr(options, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')}: {getattr(options, name)} is not possible")
    if options.micro_batch < 1:
        raise UsageError(f"--micro-batch: {options.micro_batch} is not possible, it must be 1 or more")
    if options.max_nodes and options.min_nodes > options.max_nodes:
        raise UsageError(f"--min-nodes {options.min_nodes} is more than --max-nodes {options.max_nodes}")
    return values, ResizeLimits(
        options.min_nodes, options.max_nodes, options.global_batch, options.micro_batch, options.batch, options.gpus,
        _model(options),
    )  # fmt: skip


def _model(options: argparse.Namespace) -> SpeedModel | None:
    """Return the planner's model of the run, if named. Raises UsageError."""
    if options.model is None:
        if options.gpu or options.seq or options.calibration or options.profile:
            raise UsageError("--gpu, --seq, --calibration and --profile are for --model: which one does the run train?")
        return None
    if not options.global_batch or options.batch == "scale":
        raise UsageError("--model needs --global-batch N, the samples of a step, and --batch keep")
    if options.seq < 0:
        raise UsageError(f"--seq {options.seq}: there must be at least 1 token")
    options.framework = known_framework(options.framework)
    _, stack = machine_and_stack(options.gpu or "H100", 8, options.framework)
    model = uniform(find_model(options.model), options.seq)
    known, nearby = calibration_of(options.calibration)
    calibrated, profile = options.calibration is not None, profile_of(options.profile)
    training = Training(model, options.global_batch, known, stack, space_of(options.framework), calibrated, nearby)

    def on(gpu: str, gpus_per_node: int) -> tuple[Training, Machine]:
        try:
            machine = machine_and_stack(options.gpu or gpu, gpus_per_node, options.framework)[0]
        except UsageError as error:
            raise UsageError(f"{error} (--gpu TYPE says what the run's nodes have)") from None
        told, machines, _ = as_measured(training, {machine.gpu: machine}, profile)
        return told, machines[machine.gpu]

    return SpeedModel(on)


def _once(resizer: Resizer, options: argparse.Namespace) -> int:
    decision, error = resizer.step()
    _say(decision, error, options)
    return 1 if error else 0


def _watch(
    resizer: Resizer, view: ResizeView, options: argparse.Namespace, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Look and act until the run is over. An error is printed once, and the next look tries again."""
    view.watch()
    said = failed = ("", "", "")
    pause_s = options.watch
    while True:
        try:
            decision, error = resizer.step()
        except (SlurmError, OSError) as failure:
            if said[2] != str(failure):
                _print_error(f"{failure}; looking again", options)
            said = ("", "", str(failure))
            pause_s = max(options.watch, min(2 * pause_s, LONGEST_PAUSE_S))
        else:
            pause_s = options.watch
            now = (decision.action, decision.code, error)
            if (decision.action != "stay" and not error) or now not in (said, failed):
                _say(decision, error, options)
            said, failed = now, now if error else failed
            if decision.code == "over":
                return 0
        sleep(pause_s)


def _say(decision: ResizeDecision, error: str, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"v": 1, "time": round(time.time(), 3), **asdict(decision), "error": error}), flush=True)
        return
    would = "would " if (options.dry_run or options.observe) and decision.action != "stay" else ""
    size = decision.sizes[0] if decision.sizes else "?"
    what = {
        "stay": "stay", "grow": f"grow to {decision.nodes} nodes", "shrink": f"shrink to {decision.nodes} nodes",
        "end": "end joiners", "withdraw": "withdraw joiners", "reshape": f"reshape the next job to {size} nodes",
    }[decision.action]  # fmt: skip
    jobs = f" (job{'s' * (len(decision.jobs) != 1)} {', '.join(decision.jobs)})" if decision.jobs else ""
    line = f"{would}{what}{jobs}: {printable(decision.reason, 500)}"
    if options.dry_run:
        line += " (dry run: nothing is done or written)"
    if not options.launcher:
        print(line, flush=True)
    elif decision.action != "stay":  # reasons to stay are in the ledger
        print(stamped(f"--resize: {line}"), file=sys.stderr, flush=True)
    if error:
        _print_error(error, options)


def _print_error(text: str, options: argparse.Namespace) -> None:
    print(stamped(f"--resize: {text}") if options.launcher else f"resilio: {text}", file=sys.stderr, flush=True)


def _values(words: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{word!r} is not of the form KEY=VALUE (see: resilio submit --explain joiner)")
        if normalised(key) in ("nodes", "run_dir", "comment"):
            raise UsageError(f"{normalised(key)} is chosen by resilio resize itself")
        values[normalised(key)] = value
    render_joiner({**values, "run_dir": "."}, 1)  # a wrong key or value is reported now
    return values


def _parser() -> Parser:
    parser = Parser(
        prog="resilio resize",
        description="Looks at a run, at idle nodes, at jobs that wait and at limits, and decides whether the run "
        "should have more nodes (joiner jobs are submitted), fewer (joiners are asked to leave after the next commit), "
        "or stay as it is. Each decision is in the ledger: resilio ledger RUN --event resize.",
        epilog=_EXAMPLES,
    )
    run_argument.add(parser)
    parser.add_argument("values", nargs="*", metavar="KEY=VALUE", help="of the joiners' job script")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="look again and again, until the run is over")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; nothing is written anywhere")
    parser.add_argument(
        "--observe", action="store_true", help="write into the ledger what would be done, and do nothing"
    )
    parser.add_argument(
        "--min-nodes", type=int, default=0, metavar="N", help="at least (default: as --nnodes of the run)"
    )
    parser.add_argument(
        "--max-nodes", type=int, default=0, metavar="N", help="at most (default: as --nnodes of the run)"
    )
    parser.add_argument(
        "--global-batch", type=int, default=0, metavar="N", help="samples per step: sizes must divide it"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=1, metavar="N", help="samples of a rank at a time (default: 1)"
    )
    parser.add_argument(
        "--batch", choices=("keep", "scale"), default="keep",
        help="whether the script keeps its global batch with more ranks, or scales it (default: keep)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", action="store_true", help="look how busy GPUs are, with nvidia-smi in a step of the job"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="what the run trains: other sizes are judged by the planner's cost model"
    )
    parser.add_argument("--gpu", default="", metavar="TYPE", help="with --model: h100, … (default: what Slurm says)")
    parser.add_argument("--seq", type=int, default=0, metavar="N", help="with --model: tokens of a sequence")
    parser.add_argument("--framework", default=DEFAULT, metavar="NAME", help=f"with --model (default: {DEFAULT})")
    parser.add_argument("--calibration", type=Path, metavar="FILE.toml", help="with --model: of resilio plan calibrate")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE.h5", help="with --model: of resilio plan profile-comm and profile"
    )
    parser.add_argument("--policy", type=Path, metavar="FILE", help="numbers for resize_policy.toml's")
    parser.add_argument("--json", action="store_true", help="a line of JSON per decision")
    parser.add_argument("--launcher", type=int, default=0, help=argparse.SUPPRESS)  # end when this parent is gone
    return parser
