"""The ranking as a table for a terminal, and why other layouts lost."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.autoparallel.search.ranking import Searched, at_shape
from resilio_hpc.autoparallel.search.rejected_candidates import rejected_candidates
from resilio_hpc.cli.plan.setting import PlanAnswer, PlanSetting
from resilio_hpc.core import terminal
from resilio_hpc.core.json_fields import printable
from resilio_hpc.events.phrases import plural, seconds

BAR = 10
WIDE = 168  # for files and pipes: nothing is folded
START_STYLE = {"now": "green", "soon": "yellow", "ever": "dim"}


def show(asked: PlanSetting, found: PlanAnswer, options: argparse.Namespace) -> None:
    """Print everything: as wide as the terminal, or with ``--wide`` and to files and pipes as wide as it is."""
    console = terminal.console(highlight=False, soft_wrap=False)
    fits = console.is_terminal and not options.wide
    if not fits:
        console = terminal.console(highlight=False, width=WIDE)
    shown = found.front if options.pareto else found.choices
    console.print(_head(asked, found), soft_wrap=not fits)
    for part in ranking(shown[: max(options.top, 1)], options.rank, asked.reliability.steps, console.width):
        console.print(part)
    for line in _after(asked, found, shown, options):
        for piece in terminal.wrapped(line, console.width) if fits else [line]:
            console.print(Text(piece), soft_wrap=True)


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


def ranking(choices: Sequence[Choice], rank: str, steps: int, width: int) -> list[RenderableType]:
    """Return the table with a row per choice, and in a narrow terminal the layout below each row. Pure."""
    costly = rank != "time" or steps > 0
    names = [*NUMBERS, *(COSTS if costly else ())]
    rows = [[*_cells(one), *(_cost_cells(one) if costly else ())] for one in choices]
    layouts = [str(one.layout) for one in choices]
    columns = [(name, [row[number] for row in rows]) for number, name in enumerate(names)]
    natural = sum(_width(name, cells) for name, cells in columns) + 3 * len(columns) + max(map(len, layouts)) + 2
    if natural > width and width < WIDE:
        return list(_narrow(columns, layouts, width))
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in (*names, "layout"):
        drawn.add_column(name, no_wrap=True)
    for row, layout in zip(rows, layouts, strict=True):
        drawn.add_row(*row, Text(layout))
    return [drawn]


NUMBERS = ("shape", "start", "iteration", "MFU", "memory", "bubble", "comm.")
COSTS = ("lost", "GPU-hours", "finish")
LEFT_OUT = ("comm.", "bubble", "lost", "memory", "MFU", "GPU-hours", "iteration")
"""What a narrow terminal leaves out first. Of memory it is the bar, of the iteration its band."""
SHORTER: Mapping[str, Callable[[Text], Text]] = {
    "memory": lambda cell: cell[BAR + 1 :],
    "iteration": lambda cell: Text(cell.plain.partition(" (")[0]),
}


def _narrow(columns: list[tuple[str, list[Text]]], layouts: Sequence[str], width: int) -> Iterator[Text]:
    """Yield the table in at most ``width`` columns: a row of numbers, and its layout below."""
    left_out = []
    for name in LEFT_OUT:
        if _needs(columns) <= width:
            break
        change = SHORTER.get(name)
        if change is None:
            left_out += [known for known, _ in columns if known == name]
        columns = [
            (known, [change(cell) for cell in cells] if change and known == name else cells)
            for known, cells in columns
            if known != name or change
        ]
    widths = {name: _width(name, cells) for name, cells in columns}
    widths["shape"] -= max(0, min(_needs(columns) - width, widths["shape"] - 8))  # a partition with a long name
    yield Text()
    yield _row([Text(name, "bold") for name, _ in columns], list(widths.values()))
    yield Text("─" * min(_needs(columns), width), "dim")
    for number, layout in enumerate(layouts):
        yield _row([cells[number] for _, cells in columns], list(widths.values()))
        for part in textwrap.wrap(layout, width, initial_indent="  ", subsequent_indent="    "):
            yield Text(part)
    if left_out:
        yield Text(f"left out at this width: {', '.join(left_out)} (--wide)", "dim")
    yield Text()


def _width(name: str, cells: Sequence[Text]) -> int:
    return max(len(name), *(cell.cell_len for cell in cells))


def _needs(columns: Sequence[tuple[str, Sequence[Text]]]) -> int:
    return sum(_width(name, cells) for name, cells in columns) + 2 * (len(columns) - 1)


def _row(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text()
    for cell, width in zip(cells, widths, strict=True):
        fitted = cell.copy()
        fitted.truncate(width, overflow="ellipsis", pad=True)
        line.append_text(fitted).append("  ")
    line.rstrip()
    return line


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
