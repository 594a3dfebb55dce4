"""An explained layout drawn: as lines of text, as SVG, as a page of HTML. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from resilio_hpc.autoparallel.cost.schedule import Pass
from resilio_hpc.autoparallel.report.explain import Explained
from resilio_hpc.core.svg import rect, text

PARTS = {
    "compute": ("computing", "#3b6ea8"),
    "tensor_parallel": ("tensor parallel traffic", "#c2703d"),
    "expert_parallel": ("expert parallel traffic", "#a34f8f"),
    "context_parallel": ("context parallel traffic", "#7a6bb0"),
    "pipeline_transfers": ("pipeline transfers", "#b59a2d"),
    "bubble": ("pipeline bubble", "#c9cdd3"),
    "data_parallel": ("data parallel traffic", "#b0453f"),
    "optimizer": ("optimizer", "#4f8f6f"),
    "host": ("launching of kernels", "#8a8f98"),
    "offload": ("copies to the host's memory", "#6f5b3e"),
}
_MEMORY = {
    "states": ("weights, gradients, optimizer", "#3b6ea8"),
    "activations": ("activations", "#4f8f6f"),
    "head": ("logits", "#b59a2d"),
    "other": ("CUDA, NCCL, fragments", "#8a8f98"),
}
_FORWARD, _BACKWARD, _IDLE, _AFTER = ("#7fa7d6", "#5a86bd"), ("#8fc7a4", "#65a780"), "#eceef1", "#d99a94"
WIDTH, LEFT, ROW = 1000, 70, 22


# -- text --------------------------------------------------------------------------------------------------------------


def text_lines(passes: Sequence[Pass], width: int = 100) -> list[str]:
    """Return a line per stage.

    Digits are forward passes of micro-batches, letters backward ones (a is 0), dots are idle.
    """
    end = max(one.end_s for one in passes)
    stages = 1 + max(one.stage for one in passes)
    rows = [["·"] * width for _ in range(stages)]
    for one in passes:
        mark = str(one.micro_batch % 10) if one.forward else chr(ord("a") + one.micro_batch % 10)
        first, last = (round(moment / end * width) for moment in (one.start_s, one.end_s))
        rows[one.stage][first : max(last, first + 1)] = [mark] * (max(last, first + 1) - first)
    return ["".join(row[:width]) for row in rows]


# -- SVG ---------------------------------------------------------------------------------------------------------------


def svg(found: Explained, title: str) -> str:
    """Return a stand-alone picture: timeline, parts of an iteration, memory of the stages."""
    drawn: list[str] = []
    y = _heading(drawn, found, title)
    y = _timeline(drawn, found, y)
    y = _parts(drawn, found, y + 34)
    y = _memory(drawn, found, y + 34)
    style = "text{font:12px sans-serif;fill:#222}.s{font-size:10px}.h{font-weight:bold;font-size:13px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" width="{WIDTH}" height="{y + 10}">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def html(found: Explained, title: str) -> str:
    """Return a page with the picture."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>svg{{max-width:100%;height:auto}}</style></head>\n<body>\n"
        f"{svg(found, title)}</body></html>\n"
    )


def _heading(drawn: list[str], found: Explained, title: str) -> int:
    band = f"{found.iteration_s:.3g} s per iteration ({found.low_s:.3g} to {found.high_s:.3g}), MFU {found.mfu:.1%}"
    drawn.append(text(10, 22, title, "h"))
    drawn.append(text(10, 42, f"{found.layout}: {band}"))
    return 70


def _timeline(drawn: list[str], found: Explained, y: int) -> int:
    count = found.layout.micro_batches
    some = "" if found.drawn == count else f": {found.drawn} of {count} micro-batches, the others repeat the middle"
    drawn.append(text(10, y, f"Pipeline{some}", "h"))
    y += 12
    end = max(one.end_s for one in found.passes)
    scale = (WIDTH - LEFT - 10) / (end + found.after_s)
    for stage in range(found.layout.pp):
        drawn.append(text(LEFT - 8, y + stage * ROW + 15, f"stage {stage}", "s", "end"))
        drawn.append(rect(LEFT, y + stage * ROW, (WIDTH - LEFT - 10), ROW - 3, _IDLE))
        drawn.append(rect(LEFT + end * scale, y + stage * ROW, found.after_s * scale, ROW - 3, _AFTER,
                           f"gradients and optimizer, {found.after_s:.3g} s"))  # fmt: skip
    drawn += [_pass(one, y, scale) for one in found.passes]
    y += found.layout.pp * ROW + 14
    drawn.append(text(LEFT, y, "0 s", "s"))
    drawn.append(text(WIDTH - 10, y, f"{end + found.after_s:.3g} s", "s", "end"))
    legend = [("forward", _FORWARD[0]), ("backward", _BACKWARD[0]), ("idle", _IDLE), ("gradients, optimizer", _AFTER)]
    return _legend(drawn, legend, y + 8)


def _pass(one: Pass, y: int, scale: float) -> str:
    fill = (_FORWARD if one.forward else _BACKWARD)[one.chunk % 2]
    x, width, top = LEFT + one.start_s * scale, (one.end_s - one.start_s) * scale, y + one.stage * ROW
    way = "forward" if one.forward else "backward"
    tip = f"micro-batch {one.micro_batch}, part {one.chunk}, {way}: {one.start_s:.3g} to {one.end_s:.3g} s"
    number = text(x + width / 2, top + 14, str(one.micro_batch), "s", "middle") if width > 14 else ""
    return rect(x, top, width - 0.6, ROW - 3, fill, tip) + number


def _legend(drawn: list[str], entries: Sequence[tuple[str, str]], y: float) -> int:
    x = float(LEFT)
    for words, fill in entries:
        wide = 24 + 6.4 * len(words)
        if x + wide > WIDTH:
            x, y = float(LEFT), y + 18
        drawn.append(rect(x, y, 12, 12, fill))
        drawn.append(text(x + 16, y + 10, words, "s"))
        x += wide
    return int(y + 16)


def _parts(drawn: list[str], found: Explained, y: int) -> int:
    drawn.append(text(10, y, "Where an iteration goes (what overlaps counts twice)", "h"))
    y += 12
    total = sum(max(value, 0.0) for value in found.parts.values())
    x = float(LEFT)
    shown = []
    for name, (words, fill) in PARTS.items():
        value = max(found.parts[name], 0.0)
        width = value / total * (WIDTH - LEFT - 10)
        if value < 1e-4 * total:
            continue
        drawn.append(rect(x, y, width, 26, fill, f"{words}: {value:.3g} s"))
        shown.append((f"{words} {value:.3g} s ({value / found.iteration_s:.1%})", fill))
        x += width
    return _legend(drawn, shown, y + 34)


def _memory(drawn: list[str], found: Explained, y: int) -> int:
    drawn.append(text(10, y, f"Memory of a GPU of each stage, of {found.gpu_bytes / 1e9:.0f} GB", "h"))
    y += 12
    most = max(found.gpu_bytes, *(stage.total for stage in found.stages)) * 1.08
    scale = (WIDTH - LEFT - 90) / most
    for number, stage in enumerate(found.stages):
        top, x = y + number * ROW, float(LEFT)
        drawn.append(text(LEFT - 8, top + 14, f"stage {number}", "s", "end"))
        for name, (words, fill) in _MEMORY.items():
            size = getattr(stage, name)
            drawn.append(rect(x, top, size * scale, ROW - 4, fill, f"{words}: {size / 1e9:.1f} GB"))
            x += size * scale
        over = " too large" if stage.total > found.gpu_bytes else ""
        drawn.append(text(x + 6, top + 14, f"{stage.total / 1e9:.1f} GB{over}", "s"))
    bottom, line = y + len(found.stages) * ROW, LEFT + found.gpu_bytes * scale
    drawn.append(f'<path d="M{line:.1f} {y - 4}V{bottom}" stroke="#b0453f" stroke-dasharray="4 3"/>')
    return _legend(drawn, list(_MEMORY.values()), bottom + 8)
