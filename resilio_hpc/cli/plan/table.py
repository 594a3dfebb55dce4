"""The ranking as a table for a terminal, and why other layouts lost."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from rich.text import Text

from resilio_hpc.autoparallel.base.layout import Layout
from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.autoparallel.search.ranking import Searched, at_shape, peak_flops
from resilio_hpc.autoparallel.search.rejected_candidates import rejected_candidates
from resilio_hpc.cli.plan.answer import PlanAnswer
from resilio_hpc.cli.plan.setting import PlanSetting
from resilio_hpc.core import terminal
from resilio_hpc.core.json_fields import printable
from resilio_hpc.events.phrases import plural, seconds

WIDE = 10_000  # for files and pipes: nothing is folded or left out
GIB = 2**30
START_STYLE = {"now": "green", "soon": "yellow", "ever": "dim"}


def show(asked: PlanSetting, found: PlanAnswer, options: argparse.Namespace) -> None:
    """Print everything: as wide as the terminal, or with ``--wide`` and to files and pipes as wide as it is."""
    shown = found.front if options.pareto else found.choices
    after = _after(asked, found, shown, options)
    show_table(_head(asked, found), found, after, asked.cluster.reliability.steps, options)


def show_table(
    head: Sequence[str], found: PlanAnswer, after: Iterable[str], steps: int, options: argparse.Namespace
) -> None:
    """Print the ranking between lines of text. ``steps``: of the run, 0 where they are not known."""
    console = terminal.console(highlight=False, soft_wrap=False)
    fits = console.is_terminal and not options.wide
    width = console.width if fits else WIDE
    console = terminal.console(highlight=False, width=width)
    shown = found.front if options.pareto else found.choices
    alone = len(found.choices) == 1 and not options.pareto  # of one shape, its best layouts
    kept = (found.best or shown) if alone else shown[: max(options.top, 1)]
    for line in [*head, *ranking(kept, options.rank, steps, width, names_of(options))]:
        for piece in terminal.wrapped(line, width) if isinstance(line, str) else [line]:
            console.print(Text(piece) if isinstance(piece, str) else piece, soft_wrap=True)
    for line in after:
        for piece in terminal.wrapped(line, width) if fits else [line]:
            console.print(Text(piece), soft_wrap=True)


def _head(asked: PlanSetting, found: PlanAnswer) -> list[str]:
    looked = sum(one.looked_at for one in found.searched)
    model, training, best = asked.description, asked.training, found.choices[0]
    machines = list(dict.fromkeys(asked.machines[one.offer.gpu] for one in found.searched))
    peak = peak_flops(asked.machines[best.offer.gpu], training.stack)
    shape = best.offer.shape
    where = f"{shape.nodes} x {shape.ranks_per_node} " if len(found.searched) == 1 else ""
    return [
        f"{printable(model.name, 80)} on {where}{' or '.join(dict.fromkeys(one.gpu for one in machines))}: "
        f"{model.parameters:,} parameters; a batch of {training.global_batch:,} x {training.model.seq:,} tokens; "
        f"{looked:,} layouts of {plural(len(found.searched), 'shape')} in {found.took_s:.2f} s",
        f"MFU and TFLOP/s: FLOPs of the model, masked keys counted, nothing computed again; MFU of {peak / 1e12:,.0f} "
        f"TFLOP/s. GiB: used by the fullest GPU, of what it has; {training.headroom:.0%} stay free",
    ]


def names_of(options: argparse.Namespace) -> str:
    """Return "fsdp" where the software calls ZeRO-3 so, else ""."""
    return "fsdp" if options.framework.startswith(("torchtitan", "FSDP")) else ""


def layout_text(layout: Layout, names: str = "") -> str:
    """Return a layout as it is given to ``resilio plan explain``, short: what is usual is left out."""
    text = str(layout).removesuffix("-recompute-none")
    if names == "fsdp" and layout.zero == 3:
        text = text.replace(f"-rep{layout.replicas}", "")
        text = text.replace("-zero3", f"-hsdp{layout.replicas}" if layout.replicas > 1 else "-fsdp")
    return text


def ranking(choices: Sequence[Choice], rank: str, steps: int, width: int, names: str = "") -> list[Text]:
    """Return the table: the layout first, in a narrow terminal above its row. Pure."""
    costly = rank != "time" or steps > 0
    several = len({(one.offer.shape, one.offer.partition) for one in choices}) > 1
    cluster = any(one.offer.partition or one.offer.start != "now" for one in choices)
    heads = [name for name in NUMBERS if (name != "shape" or several or cluster) and (name != "start" or cluster)]
    heads += COSTS if costly else ()
    rows = [{**_cells(one), **(_cost_cells(one) if costly else {})} for one in choices]
    columns = [(name, [row[name] for row in rows]) for name in heads]
    layouts = [layout_text(one.layout, names) for one in choices]
    columns = [("layout", [Text(text) for text in layouts]), *columns]
    if _needs(columns) > width:
        columns = _fewer(columns, width)
    if _needs(columns) > width:
        return list(_narrow(columns, layouts, width, heads))
    return [*_drawn(columns, width, [""] * len(layouts)), *_left_out(heads, columns, width)]


NUMBERS = ("shape", "start", "iteration", "tok/s/GPU", "TFLOP/s", "MFU", "GiB", "bubble", "comm.")
COSTS = ("lost", "GPU-hours", "finish")
LEFT_OUT = ("comm.", "bubble", "lost", "iteration", "TFLOP/s", "tok/s/GPU", "MFU", "GPU-hours")
"""What a narrow terminal leaves out first. Of the iteration it is its band."""

Columns: TypeAlias = list[tuple[str, list[Text]]]


def _fewer(columns: Columns, width: int) -> Columns:
    """Leave out what matters least, as long as that makes the table fit; else only what does beside the layout."""
    for name in LEFT_OUT[:4]:
        if _needs(columns) <= width:
            break
        if name == "iteration":
            columns = _without_band(columns)
        else:
            columns = [(known, cells) for known, cells in columns if known != name]
    return columns


def _without_band(columns: Columns) -> Columns:
    return [
        (name, [Text(cell.plain.partition(" (")[0]) for cell in cells] if name == "iteration" else cells)
        for name, cells in columns
    ]


def _narrow(columns: Columns, layouts: Sequence[str], width: int, heads: Sequence[str]) -> Iterator[Text]:
    """Yield the table in at most ``width`` columns: each layout, and its numbers below."""
    columns = [column for column in columns if column[0] != "layout"]
    for name in LEFT_OUT:
        if _needs(columns) + 2 <= width:
            break
        if name == "iteration":
            columns = _without_band(columns)
        else:
            columns = [(known, cells) for known, cells in columns if known != name]
    yield from _drawn(columns, width, layouts)
    yield from _left_out(heads, columns, width)


def _left_out(heads: Sequence[str], columns: Columns, width: int) -> Iterator[Text]:
    kept = {name for name, _ in columns}
    gone = [name for name in heads if name not in kept]
    if gone:
        for line in textwrap.wrap(f"left out at this width: {', '.join(gone)} (--wide)", width):
            yield Text(line, "dim")
    yield Text()


def _drawn(columns: Columns, width: int, above: Sequence[str]) -> Iterator[Text]:
    """Yield the head, a rule, and the rows; ``above`` each row a line of its own, if any."""
    indent = "  " if any(above) else ""
    widths = {name: _width(name, cells) for name, cells in columns}
    too_wide = _needs(columns) + len(indent) - width
    for name in ("start", "shape"):  # a partition with a long name
        if too_wide > 0 and name in widths:
            cut = min(too_wide, max(widths[name] - 8, 0))
            widths[name], too_wide = widths[name] - cut, too_wide - cut
    yield Text()
    yield _row([Text(name, "bold") for name, _ in columns], list(widths.values()), indent)
    yield Text("─" * min(sum(widths.values()) + 2 * (len(widths) - 1) + len(indent), width), "dim")
    for number, line in enumerate(above):
        for part in textwrap.wrap(line, width, subsequent_indent="    "):
            yield Text(part)
        yield _row([cells[number] for _, cells in columns], list(widths.values()), indent)


def _width(name: str, cells: Sequence[Text]) -> int:
    return max(len(name), *(cell.cell_len for cell in cells))


def _needs(columns: Sequence[tuple[str, Sequence[Text]]]) -> int:
    return sum(_width(name, cells) for name, cells in columns) + 2 * (len(columns) - 1)


def _row(cells: Sequence[Text], widths: Sequence[int], indent: str = "") -> Text:
    line = Text(indent)
    for cell, width in zip(cells, widths, strict=True):
        fitted = cell.copy()
        fitted.truncate(width, overflow="ellipsis", pad=True)
        line.append_text(fitted).append("  ")
    line.rstrip()
    return line


def _cells(one: Choice) -> dict[str, Text]:
    offer = one.offer
    where = f"{offer.shape.nodes} x {offer.shape.ranks_per_node}"
    where += f" {printable(offer.partition, 30)}" if offer.partition else ""
    marks = f" ({', '.join(offer.marks)})" if offer.marks else ""
    wait = f" {seconds(offer.wait_s)}" if offer.start == "soon" and offer.wait_s else ""
    return {
        "shape": Text(where),
        "start": Text(offer.start + wait + marks, START_STYLE[offer.start]),
        "iteration": Text(f"{one.iteration_s:.3g} s ({one.low_s:.3g}-{one.high_s:.3g})"),
        "tok/s/GPU": Text(f"{one.tokens_s:,.0f}"),
        "TFLOP/s": Text(f"{one.flops_s / 1e12:.0f}"),
        "MFU": Text(f"{one.mfu:.1%}"),
        "GiB": memory_text(one.memory_bytes, one.gpu_bytes),
        "bubble": Text(f"{one.bubble:.1%}"),
        "comm.": Text(f"{one.communication:.1%}"),
    }


def _cost_cells(one: Choice) -> dict[str, Text]:
    wait = "" if one.offer.wait_s is not None else "wait + "
    ends = wait + duration(one.finish_s) if math.isfinite(one.finish_s) else "never"
    hours = f"{one.gpu_hours:,.0f}" if math.isfinite(one.gpu_hours) else "-"
    return {"lost": Text(f"{one.overhead:.1%}"), "GPU-hours": Text(hours), "finish": Text(ends)}


def duration(value: float) -> str:
    """Return ``3.2 d``, ``5.1 h``, else as ``seconds``."""
    if value >= 86400:
        return f"{value / 86400:.1f} d"
    return f"{value / 3600:.1f} h" if value >= 3600 else seconds(value)


def memory_text(used: float, of: float) -> Text:
    """Return the fullest GPU's memory and what it has, GiB; red where little is left."""
    style = "red" if used > 0.95 * of else "yellow" if used > 0.85 * of else "green"
    return Text(f"{used / GIB:.0f}/{of / GIB:.0f}", style)


# -- why the others lost -----------------------------------------------------------------------------------------------


def _after(
    asked: PlanSetting, found: PlanAnswer, shown: Sequence[Choice], options: argparse.Namespace
) -> Iterator[str]:
    best = found.choices[0]
    yield from beside(shown, options)
    if options.cost == "paper":
        yield "Times are formula (3)'s, which counts neither the reduction of gradients nor the optimizer."
    else:
        name, shape = layout_text(best.layout, names_of(options)), best.offer.shape
        yield f"Why others lost to {name} on {shape.nodes} x {shape.ranks_per_node}:"
        machine = at_shape(asked.machines[best.offer.gpu], best.offer.shape.ranks_per_node)
        yield from (f"  {one.line()}" for one in rejected_candidates(asked.training, machine, best.gpus))
    yield from (f"  {line}" for line in lost_shapes(found.searched))


def beside(shown: Sequence[Choice], options: argparse.Namespace) -> Iterator[str]:
    """Yield what the table shows, where that is not the ranking, and how many it leaves out."""
    if options.pareto:
        yield f"{plural(len(shown), 'choice')} that no other beats in time, GPUs, free memory and time lost to failures"
    hidden = len(shown) - options.top
    if hidden > 0:
        yield f"and {plural(hidden, 'choice' if options.pareto else 'shape')} more: --top {len(shown)}, or --json"


def lost_shapes(searched: Sequence[Searched], whole: str = "layers, heads") -> list[str]:
    """Return shapes without a layout: one line for those that are too small, one for those unfit for the batch.

    ``whole``: parts of the model that a layout must divide.
    """
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
        lines.append(f"{plural(len(unshared), 'shape')}: no layout divides GPUs, {whole} and batch ({few})")
    return lines


def _shape(one: Searched) -> str:
    return f"{one.offer.shape.nodes} x {one.offer.shape.ranks_per_node}"
