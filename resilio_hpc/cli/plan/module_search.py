"""``resilio plan FILE.py:NAME`` for any torch module: layouts costed by its traced operators. RES-19."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from resilio_hpc.autoparallel.search.offers import offers, why_none
from resilio_hpc.autoparallel.search.ranking import peak_flops
from resilio_hpc.autoparallel.search.traced_search import TracedSearch, TracedTraining
from resilio_hpc.cli.plan import emit, submit, table
from resilio_hpc.cli.plan.answer import PlanAnswer, answer_json, answered
from resilio_hpc.cli.plan.cluster_setting import ClusterSetting, check_words, cluster_setting
from resilio_hpc.cli.plan.module_file import function_of
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.extras import require
from resilio_hpc.core.json_fields import printable
from resilio_hpc.events.phrases import plural

SOFTWARE = "PyTorch"
NOTHING = 3
_ONE = ("tp", "cp", "ep", "etp", "vpp")  # degrees that a module without a description does not have


def run(options: argparse.Namespace, command: Sequence[str], why: str = "") -> int:
    """Search, and print or submit. ``why``: it is no decoder of equal layers. Exit codes: as ``resilio plan``."""
    why = why.partition(": describe it")[0]
    _check(options, why)
    options.framework = SOFTWARE if options.framework is None else options.framework
    check_words(options)
    require("torch", "--module")
    from resilio_hpc.autoparallel.model.saved_tensors import traced_model

    model = traced_model(function_of(options.module), options.module)
    cluster = cluster_setting(options, max(model.tokens, 1))
    if why:
        print(f"resilio: {why}: costed by its operators, with data and pipeline parallelism alone", file=sys.stderr)
    dropped = ("of --calibration its parameters hold here, not its corrections for layouts like the measured ones",)
    for note in (*cluster.unknown, *cluster.notes, *(dropped if cluster.nearby is not None else ())):
        print(f"resilio: {note}", file=sys.stderr)
    training = TracedTraining(
        model, options.global_batch, cluster.known, cluster.stack, cluster.space, cluster.measured, cluster.headroom
    )
    found = _answer(training, cluster, options.rank)
    if not found.choices:
        print(f"resilio: {_in_the_way(training, cluster, found)}", file=sys.stderr)
        return NOTHING
    if options.emit:
        print(emit.emit_job(options.emit, found.choices[0], command), end="")
    elif options.json and not options.submit:
        print(json.dumps(_as_json(training, found, options), indent=1))
    elif not options.json:
        after = _after(found, options)
        head = list(_head(training, cluster, found, options))
        table.show_table(head, found, after, cluster.reliability.steps, options)
    return submit.submit(found.choices, options, command) if options.submit else 0


def _check(options: argparse.Namespace, why: str) -> None:
    """Refuse what does not go with a module. Raises UsageError."""
    if options.module is None:
        raise UsageError("--cost operators is for a torch module: FILE.py:NAME in place of MODEL")
    what, also = "a module costed by its operators", f"; {why}" if why else ""
    for name in _ONE:
        if (getattr(options, name) or 1) > 1:
            raise UsageError(f"--{name} {getattr(options, name)}: {what} has {name} = 1{also}")
    if options.seq:
        raise UsageError(f"--seq {options.seq}: {what} has the length of its inputs{also}")
    if options.offload not in (None, "none"):
        raise UsageError(f"--offload {options.offload}: {what} keeps everything on the GPUs{also}")
    if options.recompute not in (None, "none", "full"):
        raise UsageError(f"--recompute {options.recompute}: {what} has none and full{also}")
    if options.emit not in (None, "env", "sbatch"):
        raise UsageError(f"--emit {options.emit}: {what} has env and sbatch{also}")


def _answer(training: TracedTraining, cluster: ClusterSetting, rank: str) -> PlanAnswer:
    start = time.perf_counter()
    offered = offers(cluster.inventory, cluster.request, cluster.now)
    searched = TracedSearch(training).offers(offered, cluster.machines, cluster.reliability)
    return answered(searched, rank, start)


def _in_the_way(training: TracedTraining, cluster: ClusterSetting, found: PlanAnswer) -> str:
    """Return why no answer exists."""
    if not found.searched:
        return why_none(cluster.inventory, cluster.request)
    name = printable(training.model.graph.name, 80)
    looked = [one for one in found.searched if one.looked_at]
    if not looked:
        most = plural(training.model.most_stages, "stage")
        return f"{name}: no layout divides the GPUs and {training.global_batch} samples; it has {most} at most"
    near = min(looked, key=lambda one: one.least_excess)
    shape = near.offer.shape
    return (
        f"{name}: nothing fits; of {near.looked_at:,} layouts on {shape.nodes} x {shape.ranks_per_node} GPUs the "
        f"smallest lacks {near.least_excess / 1e9:.1f} GB per GPU: more GPUs, or a module that keeps less for its "
        "backward pass"
    )


# -- printing ----------------------------------------------------------------------------------------------------------


def _head(
    training: TracedTraining, cluster: ClusterSetting, found: PlanAnswer, options: argparse.Namespace
) -> Iterator[str]:
    model, best = training.model, found.choices[0]
    kinds = dict.fromkeys(cluster.machines[one.offer.gpu].gpu for one in found.searched)
    shape = best.offer.shape
    where = f"{shape.nodes} x {shape.ranks_per_node} " if len(found.searched) == 1 else ""
    looked = sum(one.looked_at for one in found.searched)
    size = f" x {model.tokens:,} tokens" if model.tokens else " samples, which tok/s counts"
    peak = peak_flops(cluster.machines[best.offer.gpu], training.stack)
    yield (
        f"{printable(model.graph.name, 80)} on {where}{' or '.join(kinds)}: {model.graph.parameter_count:,} "
        f"parameters; a batch of {training.global_batch:,}{size}; {looked:,} layouts of "
        f"{plural(len(found.searched), 'shape')} in {found.took_s:.2f} s"
    )
    yield (
        f"By {len(model.graph.operators):,} traced operators, for {options.framework}. MFU and TFLOP/s: FLOPs of the "
        f"model, masked keys counted, nothing computed again; MFU of {peak / 1e12:,.0f} TFLOP/s. GiB: used by the "
        f"fullest GPU, of what it has; {training.headroom:.0%} stay free"
    )
    if model.element_bytes >= 4:
        yield "Its parameters are fp32, and so are its products: .to(torch.bfloat16) in the function plans it in bf16"
    if model.graph.uncounted:
        names = ", ".join(printable(name, 60) for name in model.graph.uncounted)
        yield f"Costed by their bytes alone, since no formula of FLOPs is known: {names}"


def _after(found: PlanAnswer, options: argparse.Namespace) -> Iterator[str]:
    yield from table.beside(found.front if options.pareto else found.choices, options)
    best = found.choices[0]
    if best.stages:
        parts = ", ".join(printable(one, 60) for one in best.stages)
        yield f"Stages of {table.layout_text(best.layout)} after the first begin with {parts} (RESILIO_STAGES)"
    yield from (f"  {line}" for line in table.lost_shapes(found.searched, "stages"))


def _as_json(training: TracedTraining, found: PlanAnswer, options: argparse.Namespace) -> dict[str, Any]:
    """Return numbers in seconds, bytes and shares of the iteration; null where nothing is known or nothing ends."""
    graph = training.model.graph
    return {
        "model": graph.name,
        "parameters": graph.parameter_count,
        "operators": len(graph.operators),
        "uncounted": list(graph.uncounted),
        "global_batch": training.global_batch,
        "seq": training.model.tokens or None,
        **answer_json(found, options.rank, "operators"),
    }
