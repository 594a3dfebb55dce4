"""A run's report as lines for a terminal. Pure; all texts of the ledger are made printable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.terminal import local_time, wrapped
from resilio_hpc.events.phrases import plural, seconds
from resilio_hpc.events.rungs import rung_words
from resilio_hpc.report.accounting.causes import ETTR_TEXT, GOODPUT_TEXT, US, TimeCause
from resilio_hpc.report.chain.advice import lost_hours
from resilio_hpc.report.chain.checkpoint_facts import PROBLEMS, TIERS, CheckpointFacts, Spread
from resilio_hpc.report.chain.recoveries import ChainRecovery, RecoveryOutcome
from resilio_hpc.report.chain.run_report import RunReport
from resilio_hpc.report.screen_tables import fault_words

NARROWEST = 40
LONGEST_SHOWN = 5  # recoveries, with their causes
SOURCE_WORDS = {
    "memory": "memory", "local": "the nodes' own disks", "peer": "other nodes' disks",
    "committed": "the shared file system",
}  # fmt: skip


def report_lines(report: RunReport, width: int = 80) -> list[str]:
    """Return the report in lines of at most ``width`` columns; 40 at least."""
    parts = (_head, _times, _recoveries, _checkpoints, _cost, _advice, _definitions)
    lines: list[str] = []
    for part in parts:
        found = list(part(report))
        lines += ["", *found] if lines and found else found
    width = max(width, NARROWEST)
    return [piece for line in lines for piece in (wrapped(line, width) if len(line) > width else [line])]


def share(part: float, whole: float) -> str:
    """Return a percentage; ``-`` of nothing."""
    return f"{part / whole:.1%}" if whole else "-"


def state_text(report: RunReport) -> str:
    """Return how the run stands, in a few words."""
    verdict = report.state.verdict
    if verdict is not None and report.state.state == "ended":
        reason = f" ({verdict.reason})" if verdict.reason else ""
        return f"ended: {verdict.verdict.replace('_', ' ')}{reason}"
    return report.state.state


def goodput_text(report: RunReport) -> str:
    """Return goodput in one line."""
    time = report.time
    if time.goodput is None:
        return "unknown"
    bound = "" if time.steps_known else "at most "
    return (
        f"{bound}{time.goodput:.1%}: {seconds(time.useful_us / US)} of {seconds(time.jobs_us / US)} in which jobs ran"
    )


def ettr_text(report: RunReport) -> str:
    """Return the effective training time ratio in one line."""
    time = report.time
    if time.ettr is None:
        return "unknown"
    bound = "" if time.steps_known else "at most "
    trained, wall = report.by_cause[TimeCause.TRAIN] / US, time.wall_us / US
    return f"{bound}{time.ettr:.1%}: {seconds(trained)} of {seconds(wall)} of wall clock"


def _head(report: RunReport) -> Iterator[str]:
    yield f"resilio run {report.run_id}   {printable(str(report.path), 500)}"
    yield f"state    {state_text(report)}"
    yield f"size     {plural(len(report.time.parts), 'job')}, {plural(len(report.nodes.names), 'node')}"
    yield f"goodput  {goodput_text(report)}"
    yield f"ETTR     {ettr_text(report)}"


def _times(report: RunReport) -> Iterator[str]:
    wall, nodes = report.time.wall_us, report.nodes
    yield f"{'time by cause':<14}{'wall clock':>14}{'share':>9}{'node-hours':>14}{'share':>9}"
    for cause, us in report.by_cause.items():
        hours = report.cost.node_hours[cause]
        yield (
            f"{cause.value:<14}{seconds(us / US):>14}{share(us, wall):>9}{hours:>14,.2f}"
            f"{share(nodes.by_cause[cause], nodes.us):>9}"
        )
    yield f"{'total':<14}{seconds(wall / US):>14}{share(wall, wall):>9}{report.cost.total_node_hours:>14,.2f}"


# -- recoveries --------------------------------------------------------------------------------------------------------


def outcome_counts(recoveries: Sequence[ChainRecovery]) -> str:
    """Return how many recoveries of each outcome there are."""
    counts = [(outcome, sum(one.outcome is outcome for one in recoveries)) for outcome in RecoveryOutcome]
    always = (RecoveryOutcome.AUTOMATIC, RecoveryOutcome.BY_HAND, RecoveryOutcome.FAILED)
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts if count or outcome in always)


def where_text(one: ChainRecovery) -> str:
    """Return the rank and node of a fault."""
    of_node = one.fault.rank is None or one.fault.rank < 0 or one.fault.kind in ("node_lost", "spare_lost")
    name = printable(one.fault.node or "?", 255)
    drill = ", a drill" if one.fault.drill else ""
    return f"{name}{drill}" if of_node else f"rank {one.fault.rank} on {name}{drill}"


def cause_text(one: ChainRecovery) -> str:
    """Return the cause, and how sure it is."""
    if one.confidence is None:
        return "the only end on record" if not one.cause else printable(one.cause, 300)
    sure = f"{one.confidence:.0%} sure" if one.primary else "no primary cause is known"
    return f"{printable(one.cause, 300)} ({sure})"


def root_text(one: ChainRecovery) -> str:
    """Return the first line of the failed rank's message, and its place in the program."""
    first = next((line for line in one.root.splitlines() if line.strip()), "")
    place = f"{printable(one.place, 80)}: " if one.place else ""
    return f"{place}{printable(first, 300)}" if first else ""


def echoes_text(one: ChainRecovery) -> str:
    """Return how many ends are not shown, since they followed from this one."""
    return f"{one.echoes} {'echo' if one.echoes == 1 else 'echoes'} folded"


def down_text(one: ChainRecovery) -> str:
    """Return how long training was down."""
    return seconds(one.down_s) if one.down_s is not None else "-"


def done_text(one: ChainRecovery) -> str:
    """Return what was done, and by whom."""
    done = f": {printable(rung_words(one.fault.plan), 60)}" if one.fault.plan else ""
    return f"{one.outcome.value}{done}"


def _recoveries(report: RunReport) -> Iterator[str]:
    found = report.recoveries
    yield f"recoveries    {outcome_counts(found)}"
    kinds: dict[str, list[ChainRecovery]] = {}
    for one in found:
        kinds.setdefault(one.fault.kind, []).append(one)
    if kinds:
        yield f"{'fault':<36}{'times':>7}{'median':>13}{'longest':>14}{'steps':>8}"
    for kind, some in sorted(kinds.items(), key=lambda item: -len(item[1])):
        down = [one.down_s for one in some if one.down_s is not None]
        steps = sum(max(0, one.fault.lost_steps or 0) for one in some)
        middle, most = (seconds(median(down)), seconds(max(down))) if down else ("-", "-")
        yield f"{printable(fault_words(kind), 35):<36}{len(some):>7}{middle:>13}{most:>14}{steps:>8}"
    longest = sorted(found, key=lambda one: -(one.down_s if one.down_s is not None else float("inf")))[:LONGEST_SHOWN]
    if len(found) > len(longest):
        yield f"the {len(longest)} that took longest:"
    for one in sorted(longest, key=lambda one: one.fault.time):
        took = f", {down_text(one)}" if one.down_s is not None else ""
        when = local_time(one.fault.time, "%m-%d %H:%M:%S")
        yield f"  {when}  {fault_words(one.fault.kind)}, {where_text(one)}{took}; {done_text(one)}"
        yield f"      cause: {cause_text(one)}"
        if root := root_text(one):
            more = f"  [{echoes_text(one)}]" if one.echoes else ""
            yield f"      root:  {root}{more}"


# -- checkpoints -------------------------------------------------------------------------------------------------------


def spread_text(found: Spread | None) -> str:
    """Return the middle value and the largest."""
    if found is None:
        return "not known"
    return f"median {seconds(found.median)}, at most {seconds(found.most)}"


def checkpoint_rows(saves: CheckpointFacts) -> Iterator[tuple[str, str]]:
    """Return (name, value) of what is known about checkpoints."""
    yield (
        "committed",
        f"{plural(saves.committed, 'step')}, every {seconds(saves.interval_s.median)}"
        if (saves.interval_s)
        else plural(saves.committed, "step"),
    )
    missing = f"; of {saves.not_timed} it is not known" if saves.not_timed and saves.blocked_s else ""
    yield "training waits", f"{spread_text(saves.blocked_s)}{missing}"
    yield "commit", spread_text(saves.commit_s)
    for tier in saves.tiers:
        speed = f", median {tier.bytes_per_s / 1e9:.3g} GB/s per node" if tier.bytes_per_s else ""
        size = f"{tier.size_bytes / 1e9:,.3g} GB in {plural(tier.transfers, 'transfer')}"
        yield TIERS[tier.tier], f"{size}, {spread_text(tier.seconds)}{speed}"
    for source, took in saves.restores.items():
        yield f"restored from {SOURCE_WORDS[source]}", f"{plural(took.count, 'time')}, {spread_text(took)}"
    for kind, count in saves.problems.items():
        yield "problem", f"{plural(count, 'time')}: a checkpoint {PROBLEMS[kind]}"


def _checkpoints(report: RunReport) -> Iterator[str]:
    yield "checkpoints"
    for name, value in checkpoint_rows(report.checkpoints):
        yield f"  {name:<15} {value}"


# -- cost, advice, definitions -----------------------------------------------------------------------------------------


def cost_text(report: RunReport) -> str:
    """Return the cost in one line."""
    cost = report.cost
    of_gpus = f"{plural(cost.gpus_per_node, 'GPU')} per node" if cost.gpus_per_node else "no GPU is known of"
    total, lost = cost.hours(), lost_hours(cost)
    unused = f"{lost:,.2f} of them ({share(lost, total)}) did not move training forward"
    return f"{total:,.2f} {cost.unit} ({of_gpus}); {unused}"


def _cost(report: RunReport) -> Iterator[str]:
    yield f"cost          {cost_text(report)}"


def _advice(report: RunReport) -> Iterator[str]:
    yield "what to change"
    for one in report.advice:
        change = f"{one.change}: " if one.change else ""
        yield f"  {one.subject}: {change}{one.why}"


def _definitions(report: RunReport) -> Iterator[str]:
    yield GOODPUT_TEXT
    yield ETTR_TEXT
    if not report.time.steps_known:
        yield "The script reports no steps, so a round counts from the start of its ranks, and both are upper bounds."
