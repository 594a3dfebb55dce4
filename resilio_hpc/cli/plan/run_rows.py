"""Runs as rows of a table: step times of their ledgers, also while they go on; the rest as recorded or given."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from resilio_hpc.autoparallel.base.layout import Layout, Offload, Recompute
from resilio_hpc.autoparallel.measure.row_of import row_of
from resilio_hpc.autoparallel.search.frameworks import machine_and_stack
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.plan import cluster_setting, search_options, setting
from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.ledger import LedgerReader
from resilio_hpc.launch.config.rank_layout import model_parallel
from resilio_hpc.report.step_times import SteadyPace, paces
from resilio_hpc.slurm.runs import run_names

_WORDS = ("micro_batch", "global_batch", "cp", "ep", "etp", "vpp", "zero", "replicas", "head_layers")


def filled_rows(rows: Sequence[Mapping[str, str]], is_measured: Sequence[bool]) -> list[dict[str, str]]:
    """Return the rows with the step times of their runs (column run_dir), where they have no time of their own.

    A run that has made no steady steps yet is named on standard error, and its row stays without a time.
    """
    done = [dict(row) for row in rows]
    for row, has_time in zip(done, is_measured, strict=True):
        if has_time or not row.get("run_dir"):
            continue
        ranks = row.get("num_gpus", "")
        found = [one for one in _paces(Path(row["run_dir"])) if str(one.ranks) == ranks and one.step_s > 0]
        if found:
            row["iter_time_s"] = f"{found[-1].step_s:.6g}"
        else:
            print(f"resilio: {row['run_dir']}: no steady steps on {ranks} GPUs yet", file=sys.stderr)
    return done


def rows_of_run(name: str, words: Sequence[str]) -> list[dict[str, str]]:
    """Return a row for each size and layout in which a run made steps.

    ``words``: options that say what the ledger does not; they win over what it says. Raises UsageError.
    """
    path = trusted_files.run_directory(run_names.run_path(name))
    found = [one for one in _paces(path) if one.step_s > 0]
    if not found:
        raise UsageError(f"{path}: no steady steps: it needs run.steps or run.step_done, and some seconds of training")
    return [_row(one, words) | {"run_dir": str(path), "iter_time_s": f"{one.step_s:.6g}"} for one in found]


def _paces(path: Path) -> list[SteadyPace]:
    return paces(LedgerReader(path / "ledger").read_new())


def _row(pace: SteadyPace, words: Sequence[str]) -> dict[str, str]:
    options = _options(pace, words)
    recorded = pace.layout
    gpu = options.gpu or recorded.get("gpu", "")
    if not gpu:
        raise UsageError("the run's ledger does not name the GPUs: --gpu TYPE")
    options.global_batch = options.global_batch or _whole(recorded.get("global_batch", ""))
    cluster_setting.check_words(options)
    setting.check_model(options)
    _, model = setting.described(options)
    machine, _ = machine_and_stack(
        gpu, pace.ranks // max(pace.nodes, 1), options.framework, options.precision, options.interconnect
    )
    layout = _layout(pace, options)
    return row_of(model, layout, machine, options.framework, options.precision)


def _options(pace: SteadyPace, words: Sequence[str]) -> argparse.Namespace:
    """Return options of a search: the words of --layout-options, and the user's own."""
    parser = Parser(prog="resilio plan calibrate --run", allow_abbrev=False)
    parser.add_argument("model", nargs="?")
    search_options.add_model(parser)
    search_options.add_cluster(parser)
    asked: argparse.Namespace = parser.parse_known_args(list(pace.asked))[0]
    given = parser.parse_args(list(words))
    plain = parser.parse_args([])
    for name, value in vars(given).items():
        if value != getattr(plain, name):
            setattr(asked, name, value)
    if given.model or given.megatron or given.module:  # one of them names the model
        asked.model, asked.megatron, asked.module = given.model, given.megatron, given.module
    return asked


def _whole(text: str) -> int:
    """Return a number that a run has recorded; 0 for anything else."""
    return int(text) if text.isdecimal() and len(text) < 12 else 0


def _layout(pace: SteadyPace, options: argparse.Namespace) -> Layout:
    """Return the layout: what is given wins over what was planned, and that over --layout."""
    recorded = dict(pace.layout)
    tp, pp = model_parallel(pace.layouts, pace.ranks)
    numbers = {"tp": tp, "pp": pp} | {
        name: _whole(recorded[name]) for name in ("tp", "pp", *_WORDS) if recorded.get(name, "").isdecimal()
    }
    numbers |= {name: value for name in (*search_options.PINS, "cp") if (value := getattr(options, name))}
    numbers["global_batch"] = options.global_batch
    if options.zero is not None:
        numbers["zero"] = options.zero
    kind = (options.recompute or recorded.get("recompute", "none")).upper()
    if "micro_batch" not in numbers:
        raise UsageError("the run's ledger does not say its micro-batch: --micro-batch N")
    inside = numbers["tp"] * numbers["pp"] * numbers.get("cp", 1)
    if inside < 1 or pace.ranks % inside:
        raise UsageError(f"tp x pp x cp = {inside} does not divide the {pace.ranks} ranks of the run")
    recompute = Recompute.__members__.get(kind, Recompute.NONE)
    offload = Offload.__members__.get((options.offload or recorded.get("offload", "none")).upper(), Offload.NONE)
    layout = Layout(**numbers, dp=pace.ranks // inside, recompute=recompute, offload=offload)  # type: ignore[arg-type]
    parallel = recorded.get("sequence_parallel", "1") in ("1", "True") and layout.tp > 1
    return replace(layout, sequence_parallel=parallel)
