"""``resilio plan explain LAYOUT``: one layout, its pipeline in time, the parts of an iteration, memory per stage."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from resilio_hpc.autoparallel.base.layout import EXAMPLE, parse_layout
from resilio_hpc.autoparallel.report.explain import Explained, explain
from resilio_hpc.autoparallel.report.timeline import PARTS, html, svg, text_lines
from resilio_hpc.autoparallel.search.frameworks import machine_and_stack
from resilio_hpc.autoparallel.search.ranking import Training, at_shape
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.common.steps import print_columns
from resilio_hpc.cli.plan import cluster_setting, search_options, setting
from resilio_hpc.cli.plan.predict import calibration_of, profile_of
from resilio_hpc.core import terminal
from resilio_hpc.core.errors import UsageError, os_error_text
from resilio_hpc.core.json_fields import printable

_EXAMPLES = f"""examples:
  resilio plan explain {EXAMPLE} --model llama3-8b --gpu h100 --global-batch 256
  resilio plan explain tp=8,pp=4,dp=4,vpp=2,mb=1,sp,zero=1 --model gpt3-175b --gpu a100 --global-batch 1536 --svg a.svg

The layout is written as resilio plan prints it; what is left out is 1, zero 0, and no recomputation.

exit codes:
  0 explained; 2 a mistake in the command line, or a layout that this model cannot have; 3 it does not fit into the GPU
"""
TOO_LARGE = 3


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the examples."""
    options = _parser().parse_args(argv)
    cluster_setting.check_words(options)
    setting.check_model(options)
    description, model = setting.described(options)
    layout = parse_layout(options.layout, options.global_batch)
    if options.per_node is not None and not 1 <= options.per_node <= 1024:
        raise UsageError(f"--per-node {options.per_node}: a node has 1 to 1024 GPUs")
    machine, stack = machine_and_stack(
        options.gpu, options.per_node or 0, options.framework, options.precision, options.interconnect
    )
    known, nearby = calibration_of(options.calibration)
    calibrated = options.calibration is not None
    training = Training(model, options.global_batch, known, stack, calibrated=calibrated, nearby=nearby)
    training, measured, notes = setting.as_measured(training, {machine.gpu: machine}, profile_of(options.profile))
    machine = measured[machine.gpu]
    for note in notes:
        print(f"resilio: {note}", file=sys.stderr)
    found = explain(training, layout, at_shape(machine, min(machine.node_gpus, layout.num_gpus)))
    name = printable(description.name, 80)
    title = f"{name} on {layout.num_gpus} {machine.gpu}, {options.global_batch} sequences of {model.seq} tokens"
    for path, draw in ((options.svg, svg), (options.html, html)):
        if path is not None:
            _write(path, draw(found, title))
    if options.json:
        print(json.dumps(_as_json(found), indent=1))
    else:
        _print(found, title)
    return TOO_LARGE if max(stage.total for stage in found.stages) > found.gpu_bytes else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio plan explain",
        description="Explains one parallel layout: when each pipeline stage works, where an iteration's time goes, and "
        "what fills each stage's memory.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_argument("layout", metavar="LAYOUT", help=f"such as {EXAMPLE}")
    parser.add_argument("--model", metavar="MODEL", help="a preset, or Hugging Face's config.json")
    parser.add_argument("--gpu", required=True, metavar="TYPE", help="h100, a100-40gb, …")
    parser.add_argument("--per-node", type=int, metavar="N", help="GPUs of a node (the usual machine's)")
    search_options.add_model(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the picture")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(os_error_text(error, str(path))) from None


def _print(found: Explained, title: str) -> None:
    layout = found.layout
    terminal.show(title)
    terminal.show(f"{layout}: {found.iteration_s:.3g} s ({found.low_s:.3g}-{found.high_s:.3g}), MFU {found.mfu:.1%}")
    count = layout.micro_batches
    some = "all" if found.drawn == count else f"{found.drawn} of"
    print()
    terminal.show(f"pipeline, {some} {count} micro-batches (digits forward, letters backward, dots idle):")
    width = max(20, min(100, terminal.columns(106) - 6))
    for stage, line in enumerate(text_lines(found.passes, width)):
        print(f"  {stage:>3} {line}")
    print("\nwhere an iteration goes (what overlaps counts twice):")
    rows = [
        (f"  {words}", f"{found.parts[name]:.4g} s", f"{found.parts[name] / found.iteration_s:.1%}")
        for name, (words, _) in PARTS.items()
        if found.parts[name] > 1e-4 * found.iteration_s
    ]
    print_columns(rows)
    print(f"\nmemory of a GPU of each stage, in GB of {found.gpu_bytes / 1e9:.0f}:")
    print_columns([("  stage", "layers", "states", "activations", "logits", "other", "all"), *_memory_rows(found)])


def _memory_rows(found: Explained) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, stage in enumerate(found.stages):
        sizes = (stage.states, stage.activations, stage.head, stage.other, stage.total)
        over = "  too large" if stage.total > found.gpu_bytes else ""
        cells = [f"{size / 1e9:.1f}" for size in sizes]
        rows.append((f"  {number}", str(stage.layers), *cells[:-1], cells[-1] + over))
    return rows


def _as_json(found: Explained) -> dict[str, Any]:
    """Return the explanation as JSON, in seconds and bytes."""
    return {
        "layout": str(found.layout),
        "iteration_s": found.iteration_s,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "mfu": found.mfu,
        "parts_s": dict(found.parts),
        "micro_batches": found.layout.micro_batches,
        "micro_batches_drawn": found.drawn,
        "passes": [asdict(one) for one in found.passes],
        "stages": [{**asdict(stage), "total": stage.total} for stage in found.stages],
        "gpu_bytes": found.gpu_bytes,
    }
