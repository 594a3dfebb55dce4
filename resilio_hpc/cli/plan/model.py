"""``resilio plan model``: the operators of a model, and its cuts into pipeline stages."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from typing import Any

from resilio_hpc.autoparallel.model.graph import OperatorGraph
from resilio_hpc.autoparallel.model.megatron_arguments import from_megatron
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.autoparallel.model.presets import find_model, presets
from resilio_hpc.autoparallel.model.transformer_graph import transformer_graph
from resilio_hpc.autoparallel.search.partition import StagePartition, partition_graph
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.common.steps import print_columns, size_text
from resilio_hpc.cli.plan.module_file import function_of
from resilio_hpc.core import terminal
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.extras import require
from resilio_hpc.core.json_fields import printable

_EXAMPLES = """examples:
  resilio plan model llama3-70b                                parameters and FLOPs per token
  resilio plan model gpt3-175b --stages 16 --band 0.05         and 16 pipeline stages
  resilio plan model ./my-model/config.json --seq 8192         Hugging Face's description
  resilio plan model --megatron "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --vocab-size 50257"
  resilio plan model --module train.py:example --stages 4      any torch module, traced on this CPU
  resilio plan model --list                                    the presets

--module FILE.py:NAME calls NAME() of that file, without memory for tensors; it returns (module, inputs), where inputs
is one micro-batch. exit codes: 0; 2 where the model or a partition of it is impossible, with what is near.
"""

NARROW = 72  # columns: the table of stages takes as many


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the examples."""
    options = _parser().parse_args(argv)
    if options.list:
        return _list(options.json)
    if [options.model, options.megatron, options.module].count(None) != 2:
        raise UsageError("one of MODEL, --megatron and --module must be given")
    model = None if options.module else _described(options)
    graph = transformer_graph(model, options.micro_batch, options.seq) if model else _traced(options.module)
    found = None if options.stages is None else partition_graph(graph, options.stages, options.band, options.blocks)
    if options.json:
        print(json.dumps(_as_json(model, graph, found, options), indent=1))
        return 0
    _print_model(model, graph, options.seq)
    if found:
        _print_stages(graph, found, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio plan model",
        description="A model's parameters and FLOPs, and its best partition into pipeline stages: what the stage that "
        "receives most receives is least, with the FLOPs of all stages within a band around their mean.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a preset, or Hugging Face's config.json")
    parser.add_argument("--megatron", metavar="ARGUMENTS", help="Megatron's arguments, quoted")
    parser.add_argument("--module", metavar="FILE.py:NAME", help="a function that makes a torch module and its inputs")
    parser.add_argument("--list", action="store_true", help="the presets")
    parser.add_argument("--stages", type=int, metavar="N", help="cut it into this many pipeline stages")
    parser.add_argument("--band", type=float, default=0.1, metavar="D", help="FLOPs within this part of the mean (0.1)")
    parser.add_argument("--blocks", action="store_true", help="keep the model's repeated blocks whole")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="N", help="sequences (1; not for --module)")
    parser.add_argument("--seq", type=int, default=0, metavar="N", help="tokens (the model's own; not for --module)")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _list(as_json: bool) -> int:
    rows = {name: preset.model.parameters for name, preset in presets().items()}
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    print_columns([(name, f"{count:,}", presets()[name].source) for name, count in rows.items()])
    return 0


def _described(options: argparse.Namespace) -> TransformerModel:
    if options.seq < 0:
        raise UsageError(f"--seq {options.seq}: there must be at least 1 token")
    if options.megatron is None:
        return find_model(options.model)
    try:
        return from_megatron(shlex.split(options.megatron))
    except ValueError as error:
        raise UsageError(f"--megatron: {error}") from error


def _traced(place: str) -> OperatorGraph:
    require("torch", "--module")
    from resilio_hpc.autoparallel.model.trace import trace_made

    return trace_made(function_of(place), place)


# -- printing ----------------------------------------------------------------------------------------------------------


def _print_model(model: TransformerModel | None, graph: OperatorGraph, seq: int) -> None:
    terminal.show(f"{printable(graph.name, 100)}: {graph.parameter_count:,} parameters")
    if model is None:
        terminal.show(
            f"  {len(graph.operators)} operators; {_flops(graph.total_flops)} for these inputs, forward and backward"
        )
        if graph.uncounted:
            terminal.show(
                f"  counted as 0, since no formula is known: {', '.join(printable(n, 60) for n in graph.uncounted)}"
            )
        return
    if model.experts:
        terminal.show(f"  {model.active_parameters:,} of them for a token: {model.topk} of {model.experts} experts")
    heads = f"{model.heads} heads" + (f" ({model.kv_heads} of keys)" if model.kv_heads != model.heads else "")
    terminal.show(f"  {model.layers} layers, hidden {model.hidden}, {heads}, MLP {model.ffn}, vocabulary {model.vocab}")
    length = seq or model.seq
    terminal.show(f"  {_flops(model.flops_per_token(length))} per token, forward and backward, at {length} tokens")


def _print_stages(graph: OperatorGraph, found: StagePartition, options: argparse.Namespace) -> None:
    mean = graph.total_flops / len(found.starts)
    where = "between blocks" if options.blocks else "between operators"
    terminal.show(f"{len(found.starts)} stages, cut {where}, FLOPs within {found.band * 100:g} % of {_flops(mean)}:")
    narrow = terminal.columns(NARROW) < NARROW
    names = ("of mean", "params") if narrow else ("of the mean", "parameters")
    rows: list[tuple[str, ...]] = [("stage", "begins with", "FLOPs", *names, "receives")]
    for index, row in enumerate(_stages(graph, found)):
        share = f"{row['flops'] / mean - 1:+.1%}"
        parameters, size = f"{row['parameters']:,}", size_text(row["input_bytes"])
        if narrow:
            parameters = f"{row['parameters'] / 1e9:.2f} G"
        rows.append((str(index), printable(row["begins_with"], 60), _flops(row["flops"]), share, parameters, size))
    print_columns(rows)
    shared = _shared(graph, found)
    if shared:
        terminal.show(
            "  in several stages, which must keep them equal: " + ", ".join(f"{n} ({s})" for n, s in shared.items())
        )


def _stages(graph: OperatorGraph, found: StagePartition) -> list[dict[str, Any]]:
    ends = [*found.starts[1:], len(graph.operators)]
    rows = []
    for first, end, flops, size in zip(found.starts, ends, found.flops, found.input_bytes, strict=True):
        parameters = sum(graph.parameters[index].count for index in graph.parameters_of(first, end))
        rows.append(
            {"begins_with": graph.operators[first].name, "operators": end - first, "flops": flops,
             "parameters": parameters, "input_bytes": size}
        )  # fmt: skip
    return rows


def _shared(graph: OperatorGraph, found: StagePartition) -> dict[str, str]:
    """Return parameters that more than one stage uses, with those stages."""
    users: dict[int, list[str]] = {}
    ends = [*found.starts[1:], len(graph.operators)]
    for stage, (first, end) in enumerate(zip(found.starts, ends, strict=True)):
        for index in graph.parameters_of(first, end):
            users.setdefault(index, []).append(str(stage))
    return {graph.parameters[i].name: ", ".join(stages) for i, stages in users.items() if len(stages) > 1}


def _as_json(
    model: TransformerModel | None, graph: OperatorGraph, found: StagePartition | None, options: argparse.Namespace
) -> dict[str, Any]:
    about: dict[str, Any] = {
        "name": graph.name, "parameters": graph.parameter_count, "operators": len(graph.operators),
        "forward_flops": graph.forward_flops, "total_flops": graph.total_flops, "uncounted": list(graph.uncounted),
    }  # fmt: skip
    if model:
        about["active_parameters"] = model.active_parameters
        about["flops_per_token"] = model.flops_per_token(options.seq)
    if found:
        about |= {"band": found.band, "largest_input_bytes": found.largest_input_bytes}
        about |= {"flops_range": found.flops_range, "stages": _stages(graph, found), "shared": _shared(graph, found)}
    return about


def _flops(value: float) -> str:
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        if value < 1000 or unit == "E":
            return f"{value:.3g} {unit}FLOPs" if value < 1000 else f"{value:.0f} {unit}FLOPs"
        value /= 1000
    raise AssertionError
