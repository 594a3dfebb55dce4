"""A study as lines for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from resilio_hpc.core.terminal import wrapped
from resilio_hpc.events.phrases import plural, seconds
from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.simulate.account import SimulatedResult
from resilio_hpc.simulate.constants import Constant, SourceKind
from resilio_hpc.simulate.study import RESILIO, Row, Study

COLUMNS = (
    (TimeCause.TRAIN, "train"), (TimeCause.SAVE, "save"), (TimeCause.REPEATED, "again"), (TimeCause.LOAD, "load"),
    (TimeCause.DETECT, "det."), (TimeCause.RECOVER, "recov."), (TimeCause.START, "start"), (TimeCause.QUEUE, "queue"),
    (TimeCause.UNKNOWN, "unkn."),
)  # fmt: skip
NARROWEST = 60
SHORT, LONG = 16, 27  # columns of a name
MOST_TOLD = 3  # rows of which the events are told
ORDER = (SourceKind.GUESS, SourceKind.GIVEN, SourceKind.MEASURED, SourceKind.PUBLISHED, SourceKind.PRODUCT)


def study_lines(found: Study, width: int = 80, constants: bool = False) -> list[str]:
    """Return a study in lines of at most ``width`` columns. ``constants``: each number with its source."""
    parts = [
        _head(found),
        _results(found),
        _causes(found),
        _events(found),
        _numbers(found) if constants else _guesses(found),
    ]
    lines: list[str] = []
    for part in parts:
        rows = list(part)
        lines += ["", *rows] if lines and rows else rows
    width = max(width, NARROWEST)
    return [piece for line in lines for piece in (wrapped(line, width) if len(line) > width else [line])]


def name_of_row(row: Row) -> str:
    """Return a row's policy and what differs."""
    return f"{row.case.policy} {row.case.differs}".strip()


def labels(found: Study) -> list[tuple[str, str]]:
    """Return for each row its name, and what stands for it where there is little room."""
    names = [name_of_row(row) for row in found.rows]
    if len({row.case.policy for row in found.rows}) == 1 and len(names) > 1:
        names = [row.case.differs for row in found.rows]
    if max(map(len, names)) <= SHORT:
        return [(name, name) for name in names]
    return [(f"{number}. {name}", f"row {number}") for number, name in enumerate(names, 1)]


def ettr(one: SimulatedResult) -> float:
    """Return a result's ETTR."""
    return one.ettr


def goodput(one: SimulatedResult) -> float:
    """Return a result's goodput."""
    return one.goodput


def work(one: SimulatedResult) -> float:
    """Return a result's share of the work that no loss would have left."""
    return one.work


def of_held(one: SimulatedResult) -> float:
    """Return a result's work as a share of what the nodes that were held could have done."""
    return one.of_held


def setup_text(found: Study) -> str:
    """Return what is simulated in one line."""
    setup = found.setup
    return (
        f"{setup.gpus:,} GPUs on {plural(setup.nodes, 'node')} for {setup.seconds / 86_400:g} days, "
        f"{plural(len(found.seeds), 'repeat')} (seed {found.seeds[0]})"
    )


def fleet_text(found: Study) -> str:
    """Return how often it fails in one line."""
    return f"{found.fleet.name}: a fault every {seconds(found.fleet.mtbf_s(found.setup.gpus))} ({found.fleet.source})"


def options_text(found: Study) -> str:
    """Return how it is run in one line."""
    setup = found.setup
    more = [
        plural(setup.spares, "spare"), f"a save every {seconds(setup.save_every_s)}",
        f"jobs of {setup.job_s / 3600:g} h" if setup.job_s else "one job without a limit",
        *(words for flag, words in (
            (setup.partner_copies, "partner copies"), (setup.replicated, "replicated state"),
            (setup.local_disks, "steps on the nodes' disks"), (setup.evict_devices, "bad GPUs evicted"),
        ) if flag),
    ]  # fmt: skip
    return ", ".join(more) + ("; but as each row says" if any(row.case.differs for row in found.rows) else "")


def _head(found: Study) -> Iterator[str]:
    yield f"simulated  {setup_text(found)}"
    yield f"faults     {fleet_text(found)}"
    yield f"setup      {options_text(found)}"


def _results(found: Study) -> Iterator[str]:
    yield f"{'':<28}{'ETTR':>8}{'least … most':>16}{'goodput':>9}{'work':>8}{'of held':>9}"
    for row, (name, _) in zip(found.rows, labels(found), strict=True):
        least, most = row.spread(ettr)
        spread = f"{least:.1%} … {most:.1%}" if len(row.results) > 1 else "-"
        if len(name) > LONG:
            yield name
        yield (
            f"{name if len(name) <= LONG else '':<28}{row.middle(ettr):>8.1%}{spread:>16}{row.middle(goodput):>9.1%}"
            f"{row.middle(work):>8.1%}{row.middle(of_held):>9.1%}"
        )
    yield (
        "ETTR: train / wall clock. Goodput: train and save / time in which jobs ran. Work: done / what all "
        "nodes would have done without any loss. Of held: done / what all nodes could have done, spares too, while "
        "jobs held them. Medians."
    )


def _causes(found: Study) -> Iterator[str]:
    yield f"{'% of the time':<17}" + "".join(f"{words:>7}" for _, words in COLUMNS)
    for row, (_, name) in zip(found.rows, labels(found), strict=True):
        yield f"{name:<17}" + "".join(f"{100 * row.share(cause):>7.2f}" for cause, _ in COLUMNS)


def _events(found: Study) -> Iterator[str]:
    shown = [(row, name) for row, (_, name) in zip(found.rows, labels(found), strict=True)
             if row.case.policy == RESILIO]  # fmt: skip
    for row, name in shown:
        done = [
            (row.count(name), words) for name, words in (
                ("faults", "faults"), ("restart_ranks", "restarts in place"), ("replace_node", "with a spare"),
                ("shrink", "in a smaller world"), ("next_job", "left to the next job"), ("stop", "given up"),
                ("jobs by the chain", "jobs by the chain"), ("jobs by hand", "jobs by hand"),
            )
        ]  # fmt: skip
        if len(shown) <= MOST_TOLD:
            yield f"{name}, a run: " + ", ".join(f"{number:,.1f} {words}" for number, words in done if number)
        stopped = [one.ended for one in row.results if one.ended]
        if stopped:
            yield (
                f"{name}: {len(stopped)} of {len(row.results)} runs {stopped[0]}: what follows is unknown, unless "
                "--set by_hand_s=S says when a person starts them again. More spares, --evict-devices, or "
                "--max-restarts may help"
            )


def value_text(one: Constant) -> str:
    """Return a number with its unit."""
    return "unknown" if one.value is None else f"{one.value:g} {one.unit}".strip()


def _guesses(found: Study) -> Iterator[str]:
    rows = found.guesses
    if rows:
        yield "guesses, better measured or given (--set, --from-run; --constants shows all numbers):"
    for one in rows:
        yield f"  {one.name} = {value_text(one)}: {one.text}"
    if found.fleet.mix_source.startswith("not published"):
        yield f"  kinds of faults of {found.fleet.name}: {found.fleet.mix_source}"


def _numbers(found: Study) -> Iterator[str]:
    for kind in ORDER:
        for one in (one for one in found.numbers if one.kind is kind):
            yield f"  {kind.value:<10}{one.name} = {value_text(one)}: {one.text} ({one.source})"
    yield f"  {'published':<10}kinds of faults: {found.fleet.mix_source}"
