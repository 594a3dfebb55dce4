"""The page's colours and layout: light and dark, and colours that colour-blind people can tell apart.

The colours are those of Okabe and Ito, "Color Universal Design" (2008), and greys. Two causes also have stripes.
"""

from __future__ import annotations

from resilio_hpc.report.accounting.causes import TimeCause

# cause: (on white, on black)
COLOURS: dict[TimeCause, tuple[str, str]] = {
    TimeCause.TRAIN: ("#0072b2", "#3f9bd6"),
    TimeCause.SAVE: ("#56b4e9", "#a6d8f7"),
    TimeCause.REPEATED: ("#e69f00", "#e69f00"),
    TimeCause.LOAD: ("#f0e442", "#f0e442"),
    TimeCause.STALLED: ("#d55e00", "#e8742a"),
    TimeCause.DETECT: ("#cc79a7", "#dc97bd"),
    TimeCause.RECOVER: ("#7a1f4d", "#b3487f"),
    TimeCause.START: ("#009e73", "#12b88a"),
    TimeCause.IDLE: ("#a3a8ae", "#767c84"),
    TimeCause.QUEUE: ("#e2e5e9", "#3a4048"),
    TimeCause.UNKNOWN: ("#f7f7f7", "#20252b"),
}
STRIPED = (TimeCause.STALLED, TimeCause.UNKNOWN)

_LAYOUT = """
*{box-sizing:border-box}
html{color-scheme:light dark}
body{margin:0 auto;max-width:1120px;padding:1rem;font:15px/1.45 system-ui,sans-serif}
body{background:var(--back);color:var(--ink)}
h1{font-size:1.35rem;margin:.2rem 0}h2{font-size:1.1rem;margin:1.8rem 0 .5rem}
a{color:var(--link)}nav a{margin-right:1rem}
a:focus-visible,summary:focus-visible,[tabindex]:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-999px}.skip:focus{left:1rem;background:var(--back);padding:.3rem}
.facts{display:flex;flex-wrap:wrap;gap:.8rem;margin:.8rem 0;padding:0}
.facts div{border:1px solid var(--line);border-radius:6px;padding:.5rem .8rem;min-width:9rem}
.facts dt{color:var(--dim);font-size:.85rem}.facts dd{margin:0;font-size:1.3rem;font-weight:600}
.facts small{display:block;font-size:.8rem;font-weight:400;color:var(--dim)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--dim);padding:.2rem 0}
th,td{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600}tbody th{white-space:nowrap}
.n{text-align:right;white-space:nowrap}td p{margin:.1rem 0}.dim{color:var(--dim)}
code{font:.85em ui-monospace,monospace;overflow-wrap:anywhere}
summary{cursor:pointer;padding:.15rem 0}details details{margin-left:1rem}
.wide{overflow-x:auto}.wide>svg{min-width:700px;width:100%;height:auto;display:block}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.4rem 0;list-style:none}
.wide svg.sw,svg.sw{width:14px;height:14px;min-width:0;display:inline-block;vertical-align:-2px;margin-right:.4rem}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .s{font-size:11px;fill:var(--dim)}
.ax{stroke:var(--line)}.back{fill:var(--back)}.job{fill:var(--band)}.rd{stroke:var(--dim)}
.st{fill:none;stroke:var(--train);stroke-width:1.5;stroke-linecap:round}
.f{stroke:var(--back);stroke-width:.7;fill:var(--ink)}.fx{stroke:var(--bad);stroke-width:2;fill:none}
.live{position:sticky;top:0;margin:0;padding:.2rem 0;background:var(--back);color:var(--dim)}
.live[data-fresh=no]{color:var(--bad);font-weight:600}
.frame{fill:none;stroke:var(--line)}
.wide>table{min-width:44rem}
@media print{body{max-width:none}}
"""


def style() -> str:
    """Return the page's style sheet."""
    return "\n".join([
        f":root{{{_variables(0)}--back:#fff;--ink:#1d2127;--dim:#5a626c;--line:#cfd4da;--band:#e9ecef;--link:#0b57d0;--bad:#c1121f}}",
        f"@media(prefers-color-scheme:dark){{:root{{{_variables(1)}--back:#14171b;--ink:#e8eaed;--dim:#a5adb8;--line:#3b424b;"
        "--band:#2a3038;--link:#8ab4f8;--bad:#ff6b6b}}",
        _LAYOUT.strip(),
        *(f".c-{cause.value}{{fill:{_fill(cause)}}}" for cause in COLOURS),
    ])  # fmt: skip


def stripes() -> str:
    """Return a picture without size, with the patterns that striped causes are filled with."""
    size = 'width="5" height="5"'
    patterns = "".join(
        f'<pattern id="p-{cause.value}" {size} patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect {size} fill="var(--{cause.value})"/><rect width="1.6" height="5" fill="var(--dim)"/></pattern>'
        for cause in STRIPED
    )
    return f'<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>{patterns}</defs></svg>'


def _fill(cause: TimeCause) -> str:
    return f"url(#p-{cause.value})" if cause in STRIPED else f"var(--{cause.value})"


def _variables(number: int) -> str:
    return "".join(f"--{cause.value}:{colours[number]};" for cause, colours in COLOURS.items())
