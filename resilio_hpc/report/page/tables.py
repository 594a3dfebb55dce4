"""The page's tables: time by cause with the ledger lines behind it, recoveries, checkpoints, cost, advice. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.ledger import Event
from resilio_hpc.core.terminal import local_time
from resilio_hpc.events.event_text import words
from resilio_hpc.events.phrases import plural, seconds
from resilio_hpc.report.accounting.causes import DEFINITIONS, US, TimeCause, TimeSpan
from resilio_hpc.report.chain.recoveries import ChainRecovery
from resilio_hpc.report.chain.report_json import line_names
from resilio_hpc.report.chain.report_text import (
    cause_text,
    checkpoint_rows,
    cost_text,
    done_text,
    down_text,
    echoes_text,
    outcome_counts,
    root_text,
    share,
    where_text,
)
from resilio_hpc.report.chain.run_report import RunReport
from resilio_hpc.report.screen_tables import fault_words

MOST_SPANS = 60  # of each cause, the longest
MOST_RECOVERIES = 2_000
OPEN_RECOVERIES = 20
_WHEN = "%Y-%m-%d %H:%M:%S"


def safe(words_: str, limit: int = 500) -> str:
    """Return text of any origin for a page: one line, no control characters, escaped."""
    return escape(printable(words_, limit))


def swatch(cause: TimeCause) -> str:
    """Return a cause's colour, as a small picture."""
    square = f'<rect width="14" height="14" class="c-{cause.value}"/>'
    return f'<svg class="sw" viewBox="0 0 14 14" aria-hidden="true">{square}</svg>'


def key(causes: Iterable[TimeCause]) -> str:
    """Return the key to the colours."""
    return f'<ul class="key">{"".join(f"<li>{swatch(cause)}{cause.value}</li>" for cause in causes)}</ul>'


def cause_table(report: RunReport) -> Iterator[str]:
    """Return the table of time by cause, with definitions, and the spans of each cause."""
    unit = report.cost.unit
    yield (
        '<div class="wide" tabindex="0" role="region" aria-label="Time by cause"><table><caption>Each microsecond of '
        f"the wall clock has one cause; {unit} also count nodes without ranks (idle).</caption><thead><tr>"
        f'<th scope="col">cause</th><th scope="col" class="n">wall clock</th><th scope="col" class="n">share</th>'
        f'<th scope="col" class="n">{unit}</th><th scope="col">what it is</th></tr></thead><tbody>'
    )
    wall = report.time.wall_us
    for cause, us in report.by_cause.items():
        yield (
            f'<tr><th scope="row">{swatch(cause)}{cause.value}</th><td class="n">{seconds(us / US)}</td>'
            f'<td class="n">{share(us, wall)}</td><td class="n">{report.cost.hours(cause):,.2f}</td>'
            f"<td>{escape(DEFINITIONS[cause])}</td></tr>"
        )
    yield (
        f'</tbody><tfoot><tr><th scope="row">total</th><td class="n">{seconds(wall / US)}</td><td class="n">'
        f'{share(wall, wall)}</td><td class="n">{report.cost.hours():,.2f}</td><td></td></tr></tfoot></table></div>'
    )
    yield "<h3>The ledger lines behind it</h3>"
    for cause in TimeCause:
        yield from _spans(cause, [span for span in report.time.spans if span.cause is cause])


def _spans(cause: TimeCause, spans: Sequence[TimeSpan]) -> Iterator[str]:
    if not spans:
        return
    shown = sorted(sorted(spans, key=lambda span: -span.us)[:MOST_SPANS], key=lambda span: span.begin_us)
    total = sum(span.us for span in spans) / US
    yield (
        f"<details><summary>{swatch_text(cause)}: {plural(len(spans), 'span')}, {seconds(total)}</summary>"
        '<table><thead><tr><th scope="col">from</th><th scope="col" class="n">for</th><th scope="col">what, and the '
        "ledger lines that say so</th></tr></thead><tbody>"
    )
    for span in shown:
        yield (
            f'<tr><td class="n">{local_time(span.begin_us / US, _WHEN)}</td><td class="n">{seconds(span.us / US)}</td>'
            f"<td>{safe(span.why)}{_lines(span.lines)}</td></tr>"
        )
    yield "</tbody></table>"
    if len(spans) > len(shown):
        left = total - sum(span.us for span in shown) / US
        more = f"And {len(spans) - len(shown)} shorter ones, {seconds(left)} in all"
        yield f"<p class=dim>{more}: resilio report --json has them.</p>"
    yield "</details>"


def swatch_text(cause: TimeCause) -> str:
    """Return a cause's colour and name, for a summary that folds."""
    return f"{swatch(cause)}{cause.value}"


def _lines(lines: Sequence[Event]) -> str:
    """Return ledger lines: where each stands, and what it says."""
    told = [
        f"<p><code>{safe(name, 300)}</code> <span class=dim>{safe(words(line.kind, line.fields), 160)}</span></p>"
        for line in lines
        for name in line_names([line])
    ]
    return "".join(told)


# -- recoveries --------------------------------------------------------------------------------------------------------


def recovery_table(report: RunReport) -> Iterator[str]:
    """Return all recoveries, the newest first; beyond the first ones, they are folded."""
    found = report.recoveries[::-1]
    yield f"<p>{escape(outcome_counts(report.recoveries))}.</p>"
    if not found:
        return
    yield from _recovery_rows(found[:OPEN_RECOVERIES])
    rest = found[OPEN_RECOVERIES:MOST_RECOVERIES]
    if rest:
        yield f"<details><summary>{plural(len(rest), 'fault')} before these</summary>"
        yield from _recovery_rows(rest)
        yield "</details>"
    if len(found) > MOST_RECOVERIES:
        yield f"<p class=dim>And {len(found) - MOST_RECOVERIES} before: resilio report --json has them.</p>"


def _recovery_rows(found: Sequence[ChainRecovery]) -> Iterator[str]:
    yield (
        '<div class="wide" tabindex="0" role="region" aria-label="Recoveries"><table><thead><tr>'
        '<th scope="col">time</th><th scope="col">fault</th><th scope="col" class="n">down for</th>'
        '<th scope="col" class="n">steps again</th>'
        '<th scope="col">cause and evidence</th></tr></thead><tbody>'
    )
    for one in found:
        steps = "-" if one.fault.lost_steps is None else str(one.fault.lost_steps)
        yield (
            f'<tr><td class="n">{local_time(one.fault.time, _WHEN)}</td><td>{safe(fault_words(one.fault.kind))}<br>'
            f'<span class="dim">{safe(where_text(one))}</span><br>{safe(done_text(one))}</td>'
            f'<td class="n">{down_text(one)}</td><td class="n">{steps}</td><td>{_evidence(one)}</td></tr>'
        )
    yield "</tbody></table></div>"


def _evidence(one: ChainRecovery) -> str:
    root = root_text(one)
    of_class = (
        f' <span class="dim">[{safe(one.failure_class, 60)}]</span>' if one.failure_class not in ("", "unknown") else ""
    )
    parts = [f"<p>{safe(cause_text(one))}{of_class}</p>"]
    if root:
        parts.append(f"<p><code>{safe(root, 300)}</code></p>")
    echoes = f", {echoes_text(one)}" if one.echoes else ""
    lines = _lines(one.lines)
    if lines:
        parts.append(f"<details><summary>{plural(len(one.lines), 'ledger line')}{echoes}</summary>{lines}</details>")
    return "".join(parts)


# -- the rest ----------------------------------------------------------------------------------------------------------


def checkpoint_table(report: RunReport) -> Iterator[str]:
    """Return what is known about checkpoints."""
    yield "<table><tbody>"
    for name, value in checkpoint_rows(report.checkpoints):
        yield f'<tr><th scope="row">{safe(name)}</th><td>{safe(value)}</td></tr>'
    yield "</tbody></table>"


def cost_section(report: RunReport) -> Iterator[str]:
    """Return the cost."""
    yield f"<p>{safe(cost_text(report))}. The table of time by cause has it by cause.</p>"


def advice_section(report: RunReport) -> Iterator[str]:
    """Return what to change, and the numbers behind it."""
    yield "<dl>"
    for one in report.advice:
        change = f"<strong>{safe(one.change)}</strong>. " if one.change else ""
        yield f"<dt><strong>{safe(one.subject)}</strong></dt><dd>{change}{safe(one.why)}.</dd>"
    yield "</dl>"
