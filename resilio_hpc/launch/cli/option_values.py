"""The meaning of the command line's raw values. Pure: environment, directory and clock are passed in."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilio_hpc.ckpt.store.urls import store_url
from resilio_hpc.core.directories import directory_path
from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.cli.option_table import FLAGS
from resilio_hpc.launch.config import options as o
from resilio_hpc.launch.config import rank_layout
from resilio_hpc.launch.config.checkpoint_options import CheckpointOptions
from resilio_hpc.launch.config.correctness_options import CorrectnessOptions
from resilio_hpc.launch.config.device_options import DeviceOptions
from resilio_hpc.launch.config.environment_options import EnvironmentOptions
from resilio_hpc.launch.config.flags import own_rows
from resilio_hpc.launch.config.hang_options import HangOptions
from resilio_hpc.launch.config.metrics_options import MetricsOptions
from resilio_hpc.launch.config.output_options import OutputOptions
from resilio_hpc.launch.config.planned_layouts import PlanningOptions
from resilio_hpc.launch.config.reentry_options import ReentryOptions
from resilio_hpc.launch.config.resize_options import ResizeOptions
from resilio_hpc.launch.config.slow_options import SlowOptions
from resilio_hpc.launch.config.streams import parse_std

LOCAL_NODES_VARIABLE = "RESILIO_LOCAL_NODES"
_LONG_DASHES = "‐‑‒–—―−"


@dataclass(frozen=True)
class Caller:
    """Where and when the command was given."""

    environment: Mapping[str, str]
    cwd: Path
    time: float
    pid: int


def interpret(raw: argparse.Namespace, caller: Caller) -> tuple[o.LaunchOptions, tuple[str, ...]]:
    """Return options and notes from a namespace of ``options_parser.build_parser``. Raises UsageError."""
    check_numbers(raw)
    script, kind, arguments = _program(raw, caller.environment)
    local_nodes = local_nodes_of(caller.environment)
    least, most = _nodes(raw, caller.environment, local_nodes)
    join_timeout, notes = _join_timeout(raw)
    if inside_a_rank(caller.environment) and not raw.standalone:
        notes += ("started by a rank of another run: it uses this machine alone, as with --standalone",)
    parse_std(raw.redirects, "--redirects")
    parse_std(raw.tee, "--tee")
    options = o.LaunchOptions(
        **_direct(o.LaunchOptions, raw),
        script=script,
        kind=kind,
        script_args=arguments,
        run_dir=str(_run_dir(raw.run_dir, caller)),
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=_nproc(raw.nproc_per_node),
        standalone=raw.standalone or inside_a_rank(caller.environment),
        local_nodes=local_nodes,
        stop_grace_s=_stop_grace(raw, caller.environment),
        join_timeout_s=join_timeout,
        signals_to_handle=_signals(raw.signals_to_handle),
        devices=DeviceOptions(**_direct(DeviceOptions, raw)),
        hangs=HangOptions(**_direct(HangOptions, raw)),
        metrics=MetricsOptions(**_direct(MetricsOptions, raw)),
        environment=EnvironmentOptions(**_direct(EnvironmentOptions, raw)),
        slow=SlowOptions(**_direct(SlowOptions, raw)),
        correctness=CorrectnessOptions(**_direct(CorrectnessOptions, raw)),
        reentry=ReentryOptions(**_direct(ReentryOptions, raw)),
        checkpoints=CheckpointOptions(
            **_direct(CheckpointOptions, raw),
            local_checkpoints=_checkpoints("--local-checkpoints", raw.local_checkpoints, caller),
            checkpoint_dir=_checkpoints("--checkpoint-dir", raw.checkpoint_dir, caller, store_url),
        ),
        planning=PlanningOptions(layout_options=_words("--layout-options", raw.layout_options)),
        resizing=ResizeOptions(
            **_direct(ResizeOptions, raw),
            resize_options=_words("--resize-options", raw.resize_options),
            resize_policy=str(caller.cwd / Path(raw.resize_policy).expanduser()) if raw.resize_policy else "",
        ),
        mpi=_mpi(raw.mpi),
        output=OutputOptions(
            **_direct(OutputOptions, raw),
            log_dir=str(caller.cwd / raw.log_dir) if raw.log_dir else "",
            local_ranks_filter=_ranks(raw.local_ranks_filter),
            log_line_prefix_template=caller.environment.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        ),
    )
    rank_layout.check(options)
    return options, notes


def _direct(options: type, raw: argparse.Namespace) -> dict[str, Any]:
    """Return the fields whose values depend on nothing but their flags."""
    return {name: flag.reads(getattr(raw, flag.dest)) for name, flag in own_rows(options).items() if flag.reads}


def check_numbers(raw: argparse.Namespace) -> None:
    """Raise UsageError for a number that its flag refuses."""
    for flag in FLAGS:
        value = getattr(raw, flag.dest)
        if wanted := flag.refuses(value):
            raise UsageError(f"{flag.names[-1]}: {value:g} is not possible, it must be {wanted}")


def _program(raw: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, o.ProgramKind, tuple[str, ...]]:
    script, arguments = raw.training_script, tuple(raw.training_script_args)
    if not script.strip():
        raise UsageError("the script's name is empty: is the shell variable that should hold it set?")
    if script[0] in _LONG_DASHES:
        plain = "--" + script.lstrip(_LONG_DASHES + "-")
        raise UsageError(f"{script!r} begins with a long dash (copied from a document?): write {plain}")
    if raw.no_python and raw.module:
        raise UsageError("--no-python and --module exclude each other: a command is not a Python module")
    if raw.no_python and not raw.run_path:
        return script, "command", arguments
    # torchrun starts $PYTHON_EXEC instead of its own interpreter; such a rank cannot be forked from this one
    python = environment.get("PYTHON_EXEC")
    if python and not raw.run_path:
        return python, "command", ("-u", *(("-m",) if raw.module else ()), script, *arguments)
    return script, "module" if raw.module and not raw.run_path else "script", arguments


def local_nodes_of(environment: Mapping[str, str]) -> int:
    """Return how many nodes this machine plays, 0 if it is just itself. Raises UsageError."""
    text = environment.get(LOCAL_NODES_VARIABLE, "")
    if not text:
        return 0
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise UsageError(f"{LOCAL_NODES_VARIABLE}={text!r} in the environment is not a number of nodes")
    return int(text)


def inside_a_rank(environment: Mapping[str, str]) -> bool:
    """Return whether the command runs in a rank of a run, or below one: Slurm's variables are the rank's there."""
    return "RESILIO_AGENT_SOCKET" in environment


def available_nodes(environment: Mapping[str, str], local_nodes: int, standalone: bool) -> int:
    """Return the number of nodes that a run may use: the allocation's, else this machine."""
    if standalone:
        return 1
    if local_nodes:
        return local_nodes
    text = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    return int(text) if environment.get("SLURM_JOB_ID") and text.isdecimal() else 1


def parse_nnodes(text: str) -> tuple[int, int]:
    """Return the bounds: ``"2"`` → (2, 2), ``"1:4"`` → (1, 4). Raises UsageError."""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--nnodes: {text!r} is neither a number of nodes (4) nor a range MIN:MAX (2:4)")
    least, most = int(parts[0]), int(parts[-1])
    if least < 1 or least > most:
        raise UsageError(f"--nnodes: {text!r} is not possible: at least one node, and MIN not above MAX")
    return least, most


def _nodes(raw: argparse.Namespace, environment: Mapping[str, str], local_nodes: int) -> tuple[int, int]:
    alone = raw.standalone or inside_a_rank(environment)
    available = available_nodes(environment, local_nodes, alone)
    unit, spares = raw.node_unit, raw.spares
    where = "the allocation has" if environment.get("SLURM_JOB_ID") and not alone else "without Slurm there is"
    if alone:
        where = "--standalone allows" if raw.standalone else "in a rank there is"
    if raw.nnodes is None:
        most = (available - spares) // unit * unit
        if most < 1:
            raise UsageError(f"--spares {spares} --node-unit {unit} leave no node to train on: {where} {available}")
        return most, most
    least, most = parse_nnodes(raw.nnodes)
    if least > available:
        ask = f"submit with sbatch --nodes {least + spares}"
        raise UsageError(f"--nnodes {raw.nnodes}: {where} {available} node{'s' * (available != 1)}; {ask}")
    if least + spares > available:
        raise UsageError(f"--nnodes {raw.nnodes} --spares {spares} need {least + spares} nodes: {where} {available}")
    if (most // unit) * unit < least:
        raise UsageError(f"--nnodes {raw.nnodes}: the range holds no multiple of --node-unit {unit}")
    return least, most


def _nproc(text: str) -> str:
    if text in ("auto", "gpu", "cpu", "xpu"):
        return text
    try:
        count = int(text)
    except ValueError:
        raise UsageError(
            f"--nproc-per-node: {text!r} is neither a whole number nor one of auto, gpu, cpu, xpu"
        ) from None
    if count < 1:
        raise UsageError(f"--nproc-per-node: {count} is not possible, a node needs at least one rank")
    return str(count)


def _checkpoints(option: str, given: str | None, caller: Caller, url: Callable[[str], str] = lambda given: "") -> str:
    if given is None:
        return ""
    if not given.strip():
        raise UsageError(f"{option} is empty: is the shell variable that should hold the directory set?")
    return url(given) or str(_directory(option, given, caller))


def _directory(option: str, given: str, caller: Caller) -> Path:
    """Return the directory. Raises UsageError for what cannot be one, such as a URL."""
    directory_path(given, option)
    return directory_path(caller.cwd / Path(given).expanduser(), option)


def _run_dir(given: str | None, caller: Caller) -> Path:
    if given is not None:
        if not given.strip():
            raise UsageError("--run-dir is empty: is the shell variable that should hold it set?")
        return _directory("--run-dir", given, caller)
    job = caller.environment.get("SLURM_JOB_ID")
    name = job or f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(caller.time))}-{caller.pid}"
    return caller.cwd / "resilio-runs" / name


def _stop_grace(raw: argparse.Namespace, environment: Mapping[str, str]) -> float:
    for value in (raw.stop_grace, raw.shutdown_timeout):
        if value is not None:
            return float(value)
    text = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if text is None:
        return o.DEFAULT_STOP_GRACE_S
    if not text.strip().isdecimal():
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text!r} in the environment is not a number of seconds")
    return float(text)


def _join_timeout(raw: argparse.Namespace) -> tuple[float, tuple[str, ...]]:
    pairs = [pair.partition("=") for pair in raw.rdzv_conf.split(",") if pair.strip()]
    for key, equals, _ in pairs:
        if not equals or not key.strip():
            raise UsageError(f"--rdzv-conf: {raw.rdzv_conf!r} is not of the form KEY=VALUE,KEY=VALUE")
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    unused = sorted(conf.keys() - {"join_timeout"})
    notes = (f"--rdzv-conf {', '.join(unused)} has no effect: there is no rendezvous server",) if unused else ()
    if raw.join_timeout is not None:
        return float(raw.join_timeout), notes
    text = conf.get("join_timeout")
    if text is None:
        return o.DEFAULT_JOIN_TIMEOUT_S, notes
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise UsageError(f"--rdzv-conf: join_timeout={text} is not a number of seconds")
    return float(text), notes


def _signals(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    known = [name for name in signal.Signals.__members__ if not name.startswith("SIG_")]
    for name in names:
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle: {name} cannot be handled by any program")
        if name not in known:
            near = difflib.get_close_matches(name.upper(), known, 1, 0.5)
            raise UsageError(f"--signals-to-handle: no signal is named {name!r}{f'; {near[0]}?' if near else ''}")
    return names


def _mpi(text: str) -> str:
    name = text.strip().lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UsageError(f"--mpi: {text!r} is no type of PMI; srun --mpi=list names those of this Slurm")
    return "" if name == "none" else name


def _ranks(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--local-ranks-filter: {text!r} is not a list of local ranks such as 0,1")
    return tuple(sorted({int(part) for part in parts}))


def _words(flag: str, text: str | None) -> tuple[str, ...]:
    """Split as a shell would."""
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: {error}") from None
