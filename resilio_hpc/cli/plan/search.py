"""``resilio plan search MODEL``: every layout of every shape that the cluster offers, ranked."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from resilio_hpc.autoparallel.base.known_words import known_framework
from resilio_hpc.autoparallel.model.model_description import NotUniform
from resilio_hpc.autoparallel.search import infeasible, paper
from resilio_hpc.autoparallel.search.frameworks import DEFAULT
from resilio_hpc.autoparallel.search.offers import offers, why_none
from resilio_hpc.autoparallel.search.ranking import RANKS, Searched, at_shape, search_offers
from resilio_hpc.autoparallel.search.rejected_candidates import rejected_candidates
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.plan import emit, module_search, search_options, setting, submit, table
from resilio_hpc.cli.plan.answer import PlanAnswer, answer_json, answered
from resilio_hpc.cli.plan.setting import PlanSetting
from resilio_hpc.core.errors import UsageError

_EXAMPLES = """examples:
  resilio plan llama3-70b --partition gpu --gpus 64 --global-batch 1024       what Slurm has, in shapes of 64 GPUs
  resilio plan llama3-70b --partition gpu --gpus 32-128 --global-batch 1024 --rank finish --tokens 1e12 --mtbf 6000
  resilio plan gpt3-175b --gpus 1024 --gpu a100 --global-batch 1536           no cluster is asked
  resilio plan ./config.json --inventory cluster.toml --global-batch 512 --framework torchtitan --emit torchtitan
  resilio plan llama3-8b --gpus 16 --gpu h100 --global-batch 256 --emit sbatch -- train.py --tp {tp} --zero {zero}
  resilio plan gpt3-175b --gpus 64 --gpu h100 --global-batch 1536 --cost paper
  resilio plan train.py:build --gpus 16 --gpu h100 --global-batch 256         any torch module
  resilio plan llama3-8b --partition gpu --gpus 16-64 --global-batch 256 --submit train.py --set time=8:00:00

exit codes:
  0 at least one layout fits; 1 Slurm did not answer; 2 a mistake in the command line, or an unknown model or GPU;
  3 no shape is offered, or no layout fits: the answer says what stands in the way, and the nearest change
"""
NOTHING = 3


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the examples."""
    words, command = _split(argv)
    options = _parser().parse_args(words)
    if command and options.emit != "sbatch" and options.submit is None:
        raise UsageError(f"-- {command[0]} …: a command is for --emit sbatch and --submit")
    submit.check_options(options)
    setting.check_model(options)
    if options.cost == "operators":
        return module_search.run(options, command)
    emit.check(options.emit, known_framework(DEFAULT if options.framework is None else options.framework))
    software = options.framework
    try:
        asked = setting.setting(options)
    except NotUniform as error:
        if options.cost != "full":
            raise
        options.framework = software
        return module_search.run(options, command, str(error))
    for note in asked.notes:
        print(f"resilio: {note}", file=sys.stderr)
    found = answer(asked, options.cost, options.rank)
    if not found.choices:
        print(f"resilio: {_in_the_way(asked, found.searched, options.cost)}", file=sys.stderr)
        return NOTHING
    if options.emit:
        about = emit.Emitted(asked.training.model, asked.description, options.precision, command)
        print(emit.emit(options.emit, found.choices[0], about), end="")
    elif options.json and not options.submit:
        print(json.dumps(as_json(asked, found, options), indent=1))
    elif not options.json:
        table.show(asked, found, options)
    return submit.submit(found.choices, options, command) if options.submit else 0


def answer(asked: PlanSetting, cost: str, rank: str) -> PlanAnswer:
    """Return the search, with the full cost model or the paper's."""
    start = time.perf_counter()
    offered = offers(asked.cluster.inventory, asked.cluster.request, asked.cluster.now)
    if cost == "paper":
        searched = paper.search_offers(offered, asked.training, asked.machines, asked.cluster.reliability)
    else:
        searched = search_offers(offered, asked.training, asked.machines, asked.cluster.reliability)
    return answered(searched, rank, start)


def _in_the_way(asked: PlanSetting, searched: Sequence[Searched], cost: str) -> str:
    """Return why no answer exists."""
    if not searched:
        return why_none(asked.cluster.inventory, asked.cluster.request)
    if cost == "paper":
        return f"{asked.description.name}: {paper.why_none(searched)}"
    nearest = min(searched, key=lambda one: (one.looked_at == 0, one.least_excess, one.offer.shape.nodes))
    shape = nearest.offer.shape
    node = asked.machines[nearest.offer.gpu]
    machine = at_shape(node, shape.ranks_per_node)
    why = infeasible.why_none(asked.training, machine, shape.ranks, asked.cluster.whole, node.node_gpus)
    return f"{asked.description.name} on {shape.nodes} x {shape.ranks_per_node} GPUs: {why}"


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio plan",
        usage="resilio plan [search] MODEL --global-batch N [--partition P | --gpu TYPE --gpus N | --inventory FILE] …",
        description="Looks at every layout of every shape (nodes x GPUs) that the cluster has room for, and ranks "
        "them. No GPU is needed.",
        epilog=f"{_EXAMPLES}\n{submit.HELP}",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a preset, or Hugging Face's config.json")
    search_options.add_model(parser)
    search_options.add_cluster(parser)
    search_options.add_run(parser)
    parser.add_argument("--rank", choices=list(RANKS), default="time",
                        help="by iteration time (default), GPU-hours, or end: wait, failures and run")  # fmt: skip
    parser.add_argument("--cost", choices=("full", "paper", "operators"), default="full",
                        help="paper: algorithm 1 and formula (3) of the Resilio paper; operators: of a module's traced "
                        "operators, as for what is no decoder of equal layers")  # fmt: skip
    parser.add_argument("--top", type=int, default=8, metavar="N", help="shapes in the table (8)")
    parser.add_argument("--wide", action="store_true", help="every column, however narrow the terminal is")
    parser.add_argument("--pareto", action="store_true", help="show what no other choice beats in everything")
    parser.add_argument("--emit", choices=emit.KINDS, help="the best choice, for a job or a framework")
    parser.add_argument("--json", action="store_true",
                        help="for programs: everything, ranked; with --submit a line per attempt")  # fmt: skip
    submit.add_options(parser)
    return parser


# -- for programs ------------------------------------------------------------------------------------------------------


def as_json(asked: PlanSetting, found: PlanAnswer, options: argparse.Namespace) -> dict[str, Any]:
    """Return numbers in seconds, bytes and shares of the iteration; null where nothing is known or nothing ends."""
    best = found.choices[0]
    machine = at_shape(asked.machines[best.offer.gpu], best.offer.shape.ranks_per_node)
    lost = [] if options.cost == "paper" else rejected_candidates(asked.training, machine, best.gpus)
    return {
        "model": asked.description.name,
        "parameters": asked.description.parameters,
        "global_batch": asked.training.global_batch,
        "seq": asked.training.model.seq,
        **answer_json(found, options.rank, options.cost),
        "rejected_candidates": [{**asdict(one), "layout": str(one.layout), "text": one.line()} for one in lost],
    }
