"""A study as a page: one file, no script, nothing loaded from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.svg import rect, text
from resilio_hpc.report.accounting.causes import DEFINITIONS, ETTR_TEXT, GOODPUT_TEXT, TimeCause
from resilio_hpc.report.page.style import stripes, style
from resilio_hpc.report.page.tables import key, safe
from resilio_hpc.simulate.study import Study
from resilio_hpc.simulate.study_text import (
    ettr,
    fleet_text,
    goodput,
    labels,
    of_held,
    options_text,
    setup_text,
    value_text,
    work,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
LEFT, WIDE, HIGH = 250.0, 740.0, 22.0
WIDEST = 38  # characters beside a bar


def study_page(found: Study) -> str:
    """Return the page."""
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>resilio simulate</title><style>\n{style()}\n</style></head><body>",
        stripes(),
        f"<header><h1>Simulated goodput</h1><p>{safe(setup_text(found), 300)}</p>"
        f"<p>{safe(options_text(found), 300)}</p><p class=dim>{safe(fleet_text(found), 500)}</p></header><main>",
        "<section id=causes><h2>Time by cause</h2>", _bars(found), key(list(TimeCause)), "</section>",
        "<section id=results><h2>Results</h2>", *_results(found), "</section>",
        "<section id=numbers><h2>Numbers, and where they come from</h2>", *_numbers(found), "</section>",
        "<section id=definitions><h2>Definitions</h2>",
        f"<p>{escape(GOODPUT_TEXT)}</p><p>{escape(ETTR_TEXT)}</p><dl>",
        *(f"<dt>{cause.value}</dt><dd>{escape(words)}</dd>" for cause, words in DEFINITIONS.items()),
        "</dl></section></main></body></html>\n",
    ])  # fmt: skip


def _bars(found: Study) -> str:
    parts, y = [], 6.0
    for row, (name, short) in zip(found.rows, labels(found), strict=True):
        x = LEFT
        parts.append(text(LEFT - 8, y + HIGH - 7, printable(name if len(name) <= WIDEST else short, 60), "s", "end"))
        for cause in TimeCause:
            wide = WIDE * row.share(cause)
            if wide >= 0.2:
                parts.append(rect(x, y, wide, HIGH, kind=f"c-{cause.value}"))
            x += wide
        y += HIGH + 6
    return (
        f'<svg viewBox="0 0 1010 {y:.0f}" role="img" aria-label="Shares of the causes of time. The table has the '
        f'numbers." xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _results(found: Study) -> Iterator[str]:
    causes = [cause for cause in TimeCause if any(row.share(cause) for row in found.rows)]
    heads = ("policy", "ETTR", "least", "most", "goodput", "work", "of held", *(cause.value for cause in causes))
    named = "".join(f"<th scope=col{' class=n' if head != 'policy' else ''}>{head}</th>" for head in heads)
    yield f'<div class=wide tabindex=0 role=region aria-label="Results"><table><thead><tr>{named}</tr></thead>'
    for row, (name, _) in zip(found.rows, labels(found), strict=True):
        shares = (row.middle(ettr), *row.spread(ettr), row.middle(goodput), row.middle(work), row.middle(of_held),
                  *(row.share(cause) for cause in causes))  # fmt: skip
        cells = "".join(f"<td class=n>{share:.2%}</td>" for share in shares)
        yield f"<tr><th scope=row>{safe(name, 200)}</th>{cells}</tr>"
    yield "</table></div>"


def _numbers(found: Study) -> Iterator[str]:
    yield '<div class=wide tabindex=0 role=region aria-label="Numbers">'
    yield "<table><thead><tr><th scope=col>number</th><th scope=col>value</th><th scope=col>from</th>"
    yield "<th scope=col>what it is</th><th scope=col>source</th></tr></thead>"
    for one in sorted(found.numbers, key=lambda one: one.kind != "guess"):
        cells = (value_text(one), one.kind.value, one.text, one.source)
        row = "".join(f"<td>{safe(cell, 300)}</td>" for cell in cells)
        yield f"<tr><th scope=row>{escape(one.name)}</th>{row}</tr>"
    yield "</table></div>"
