"""A run's report as a page: one file, no script, nothing loaded from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from resilio_hpc.core.terminal import local_time
from resilio_hpc.events.phrases import plural, seconds
from resilio_hpc.report.accounting.causes import ETTR_TEXT, GOODPUT_TEXT, US, TimeCause
from resilio_hpc.report.chain.report_text import ettr_text, goodput_text, outcome_counts, state_text
from resilio_hpc.report.chain.run_report import RunReport
from resilio_hpc.report.page import tables
from resilio_hpc.report.page.charts import shares_chart, steps_chart, value_charts
from resilio_hpc.report.page.style import stripes, style
from resilio_hpc.report.page.tables import key, safe
from resilio_hpc.report.page.timeline import timeline

# nothing is loaded, whatever a hostile name or log line may contain
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_SECTIONS = (
    ("timeline", "Timeline"),
    ("causes", "Time by cause"),
    ("recoveries", "Recoveries"),
    ("checkpoints", "Checkpoints"),
    ("cost", "Cost"),
    ("advice", "What to change"),
)


def page(report: RunReport, policy: str = _POLICY) -> str:
    """Return the page; ``policy``: what it may load."""
    name = f"run {safe(report.run_id, 60)}"
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>resilio report: {name}</title><style>\n{style()}\n</style></head><body>",
        '<a class="skip" href="#causes">Skip the pictures</a>',
        stripes(),
        *_head(report, name),
        f"<nav aria-label=\"Parts\">{''.join(f'<a href=#{anchor}>{words}</a>' for anchor, words in _SECTIONS)}</nav>",
        "<main>",
        *(piece for section in _SECTIONS for piece in _section(report, *section)),
        "</main>",
        f'<footer class="dim"><p>Made {local_time(report.now)} by resilio report from the run\'s ledger.</p></footer>',
        "</body></html>\n",
    ])  # fmt: skip


def _head(report: RunReport, name: str) -> Iterator[str]:
    yield f"<header><h1>{name}</h1><p class=dim><code>{safe(str(report.path))}</code></p><dl class=facts>"
    wall = seconds(report.time.wall_us / US)
    facts = (
        ("state", state_text(report).partition(" (")[0], state_text(report).partition(" (")[2].removesuffix(")")),
        ("goodput", *_number(goodput_text(report))),
        ("ETTR", *_number(ettr_text(report))),
        ("wall clock", wall, _times(report)),
        *_progress(report),
        ("size", plural(len(report.nodes.names), "node"), plural(len(report.time.parts), "job")),
        ("faults", str(len(report.recoveries)), outcome_counts(report.recoveries)),
        (report.cost.unit, f"{report.cost.hours():,.2f}", "over all nodes and jobs"),
    )
    for term, value, more in facts:
        yield f"<div><dt>{safe(term)}</dt><dd>{safe(value)}<small>{safe(more)}</small></dd></div>"
    yield f"</dl><p>{escape(GOODPUT_TEXT)}</p><p>{escape(ETTR_TEXT)}</p>"
    if not report.time.steps_known:
        yield "<p>The script reports no steps. Rounds count from the start of their ranks; both are upper bounds.</p>"
    yield "</header>"


def _progress(report: RunReport) -> Iterator[tuple[str, str, str]]:
    """Yield how far a run is that has not ended."""
    found = report.progress
    if found.step is None or report.state.state == "ended":
        return
    left = f"done in {seconds(found.left_s)}" if found.left_s else ""
    of_job = f"{seconds(found.job_left_s)} left in this job" if found.job_left_s is not None else ""
    then = f"then job {found.next_job}" if found.next_job else ""
    total = f"{found.step:,} of {found.total:,}" if found.total is not None else f"{found.step:,}"
    yield "step", total, "; ".join(one for one in (left, of_job, then) if one)


def _number(text: str) -> tuple[str, str]:
    value, _, more = text.partition(": ")
    return value, more


def _times(report: RunReport) -> str:
    if not report.time.spans:
        return ""
    begin, end = report.time.spans[0].begin_us / US, report.time.spans[-1].end_us / US
    return f"{local_time(begin, '%Y-%m-%d %H:%M')} to {local_time(end, '%Y-%m-%d %H:%M')}"


def _section(report: RunReport, anchor: str, words: str) -> Iterator[str]:
    parts = {
        "timeline": _pictures, "causes": tables.cause_table, "recoveries": tables.recovery_table,
        "checkpoints": tables.checkpoint_table, "cost": tables.cost_section, "advice": tables.advice_section,
    }  # fmt: skip
    yield f'<section id="{anchor}" aria-labelledby="h-{anchor}"><h2 id="h-{anchor}">{words}</h2>'
    yield from parts[anchor](report)
    yield "</section>"


def _pictures(report: RunReport) -> Iterator[str]:
    if not report.time.spans:
        yield "<p>The ledger has no event of a job yet.</p>"
        return
    yield key(cause for cause in TimeCause if report.nodes.by_cause[cause] or report.by_cause[cause])
    yield (
        "<p class=dim>Marks: a dot is a fault with an automatic recovery, a triangle one with a recovery by "
        "hand, a cross one without. Where a pixel stands for several causes, their colours take turns, so areas are in "
        "proportion. Lines under <i>rounds</i> are the beginnings of rounds.</p>"
    )
    pictures = (
        ("Nodes", timeline(report)), ("Shares of time", shares_chart(report)), ("Steps", steps_chart(report)),
        *value_charts(report),
    )  # fmt: skip
    yield from _figures((name, drawn) for name, drawn in pictures if drawn)
    yield (
        "<p class=dim>Steps are those of commits, of first steps of rounds, and of what the script logs. The ledger "
        "has no times of single steps. Loss and throughput are drawn where the script logs them "
        "(<code>run.log</code>).</p>"
    )


def _figures(pictures: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, drawn in pictures:
        yield f'<h3>{name}</h3><div class="wide" tabindex="0" role="region" aria-label="{name}">{drawn}</div>'
