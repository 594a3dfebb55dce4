"""The ranking as a table for a terminal, and why other layouts lost."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.autoparallel.search.ranking import Searched, at_shape
from resilio_hpc.autoparallel.search.rejected_candidates import rejected_candidates
from resilio_hpc.cli.plan.setting import PlanAnswer, PlanSetting
from resilio_hpc.core import terminal
from resilio_hpc.core.json_fields import printable
from resilio_hpc.events.event_text import plural, seconds

BAR = 10
WIDE = 168  # for files and pipes: nothing is folded
START_STYLE = {"now": "green", "soon": "yellow", "ever": "dim"}


def show(asked: PlanSetting, found: PlanAnswer, options: argparse.Namespace) -> None:
    """Print everything."""
    console = terminal.console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = terminal.console(highlight=False, width=WIDE)
    shown = found.front if options.pareto else found.choices
    console.print(_head(asked, found))
    console.print(table(shown[: max(options.top, 1)], options.rank, asked.reliability.steps))
    for line in _after(asked, found, shown, options):
        console.print(Text(line), soft_wrap=True)


def _head(asked: PlanSetting, found: PlanAnswer) -> Text:
    looked = sum(one.looked_at for one in found.searched)
    model = asked.description
    gpus = dict.fromkeys(asked.machines[one.offer.gpu].gpu for one in found.searched)
    training = asked.training
    return Text(
        f"{printable(model.name, 80)} on {' or '.join(gpus)}: {model.parameters:,} parameters; "
        f"a batch of {training.global_batch:,} x {training.model.seq:,} tokens; "
        f"{looked:,} layouts of {plural(len(found.searched), 'shape')} in {found.took_s:.2f} s"
    )


def table(choices: Sequence[Choice], rank: str, steps: int) -> Table:
    """Return a table with a row per choice."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    costly = rank != "time" or steps > 0
    more = ("lost", "GPU-hours", "finish") if costly else ()
    for name in ("shape", "start", "iteration", "MFU", "memory", "bubble", "comm.", *more):
        drawn.add_column(name, no_wrap=True)
    drawn.add_column("layout", overflow="fold", min_width=20)
    for one in choices:
        drawn.add_row(*_cells(one), *(_cost_cells(one) if costly else ()), Text(str(one.layout)))
    return drawn


def _cells(one: Choice) -> list[Text]:
    offer = one.offer
    where = f"{offer.shape.nodes} x {offer.shape.ranks_per_node}"
    where += f" {printable(offer.partition, 30)}" if offer.partition else ""
    marks = f" ({', '.join(offer.marks)})" if offer.marks else ""
    wait = f" {seconds(offer.wait_s)}" if offer.start == "soon" and offer.wait_s else ""
    band = f"{one.iteration_s:.3g} s ({one.low_s:.3g}-{one.high_s:.3g})"
    return [
        Text(where),
        Text(offer.start + wait + marks, START_STYLE[offer.start]),
        Text(band),
        Text(f"{one.mfu:.1%}"),
        memory_bar(one.memory_bytes, one.gpu_bytes),
        Text(f"{one.bubble:.1%}"),
        Text(f"{one.communication:.1%}"),
    ]


def _cost_cells(one: Choice) -> list[Text]:
    wait = "" if one.offer.wait_s is not None else "wait + "
    ends = wait + duration(one.finish_s) if math.isfinite(one.finish_s) else "never"
    hours = f"{one.gpu_hours:,.0f}" if math.isfinite(one.gpu_hours) else "-"
    return [Text(f"{one.overhead:.1%}"), Text(hours), Text(ends)]


def duration(value: float) -> str:
    """Return ``3.2 d``, ``5.1 h``, else as ``seconds``."""
    if value >= 86400:
        return f"{value / 86400:.1f} d"
    return f"{value / 3600:.1f} h" if value >= 3600 else seconds(value)


def memory_bar(used: float, of: float) -> Text:
    """Return a bar of the fullest GPU's memory."""
    full = min(BAR, round(BAR * used / of))
    style = "red" if used > 0.95 * of else "yellow" if used > 0.85 * of else "green"
    return Text.assemble(("█" * full, style), ("░" * (BAR - full), "dim"), f" {used / 1e9:.0f}/{of / 1e9:.0f} GB")


# -- why the others lost -----------------------------------------------------------------------------------------------


def _after(
    asked: PlanSetting, found: PlanAnswer, shown: Sequence[Choice], options: argparse.Namespace
) -> Iterator[str]:
    best = found.choices[0]
    if options.pareto:
        yield f"{plural(len(shown), 'choice')} that no other beats in time, GPUs, free memory and time lost to failures"
    hidden = len(shown) - options.top
    if hidden > 0:
        yield f"and {plural(hidden, 'choice' if options.pareto else 'shape')} more: --top {len(shown)}, or --json"
    if options.cost == "paper":
        yield "Times are formula (3)'s, which counts neither the reduction of gradients nor the optimizer."
    else:
        yield f"Why others lost to {best.layout} on {best.offer.shape.nodes} x {best.offer.shape.ranks_per_node}:"
        machine = at_shape(asked.machines[best.offer.gpu], best.offer.shape.ranks_per_node)
        yield from (f"  {one.line()}" for one in rejected_candidates(asked.training, machine, best.gpus))
    yield from (f"  {line}" for line in lost_shapes(found.searched))


def lost_shapes(searched: Sequence[Searched]) -> list[str]:
    """Return shapes without a layout: one line for those that are too small, one for those unfit for the batch."""
    small = [one for one in searched if not one.choices and one.least_excess > 0]
    unshared = [one for one in searched if not one.choices and one.least_excess <= 0]
    lines = []
    if small:
        near = min(small, key=lambda one: one.least_excess)
        lines.append(
            f"{plural(len(small), 'shape')}: nothing fits; {_shape(near)} lacks least, "
            f"{near.least_excess / 1e9:.1f} GB per GPU"
        )
    if unshared:
        few = ", ".join(_shape(one) for one in unshared[:4]) + (" …" if len(unshared) > 4 else "")
        lines.append(f"{plural(len(unshared), 'shape')}: no layout divides GPUs, layers, heads and batch ({few})")
    return lines


def _shape(one: Searched) -> str:
    return f"{one.offer.shape.nodes} x {one.offer.shape.ranks_per_node}"
