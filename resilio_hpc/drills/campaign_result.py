"""What a campaign came to: goodput of the run and of its twin, what each fault cost, and whether the bits are right."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.drills import judge
from resilio_hpc.drills.campaign_plan import CampaignPlan
from resilio_hpc.drills.campaign_run import CampaignRun
from resilio_hpc.drills.script import counting
from resilio_hpc.drills.stamped_time import StampedTime, differences, read_digests, repeated_after, stamped_time
from resilio_hpc.drills.stamps import Life, first_end_after
from resilio_hpc.report.chain.run_report import read_report


@dataclass(frozen=True)
class StruckFault:
    """One fault of a campaign. ``time`` in Unix seconds.

    ``in_recovery``: ranks did not train when it struck; ``hurts``: ranks have to be started again.
    ``recovery_s``: until ranks that were started after it had done a step; None where ranks went on, or another fault
    came first. ``repeated_steps``: those that they did again.
    """

    name: str
    time: float
    node: str
    rank: int | None
    in_recovery: bool
    hurts: bool = False
    recovery_s: float | None = None
    repeated_steps: int | None = None


@dataclass(frozen=True)
class CampaignResult:
    """What one part of a campaign came to.

    ``goodput``: by the stamps of ranks, and ``ledger_goodput`` by ``resilio report``. ``relative``: counted steps a
    second, beside the twin's. ``lost_per_fault_s``: beyond steps that were done again. ``compared``: after so many
    steps both runs' bits were compared. ``wrong``: what is not as it must be; "": nothing.
    """

    faults: tuple[StruckFault, ...]
    seconds: float
    stamped: StampedTime
    goodput: float
    ledger_goodput: float | None
    twin_goodput: float | None
    twin_ledger_goodput: float | None
    relative: float | None
    lost_per_fault_s: float | None
    compared: int
    lives: int
    wrong: str
    interrupted: bool

    @property
    def passed(self) -> bool:
        """Return whether the run came over every fault, and all that was compared is right."""
        return not self.wrong


def concluded(
    plan: CampaignPlan, run: CampaignRun, twin: CampaignRun | None, struck: Sequence[StruckFault], seconds: float,
    failed: str, interrupted: bool,
) -> CampaignResult:  # fmt: skip
    """Read what the runs left, and account for it."""
    lives = run.lives()
    mine = stamped_time(lives, run.began)
    theirs = stamped_time(twin.lives(), twin.began) if twin is not None else None
    compared, differ = 0, list[int]()
    if twin is not None:
        compared, differ = differences(read_digests(run.digest_folders()), read_digests(twin.digest_folders()))
    run.look()
    wrong = [
        failed, *(_end_of(one) for one in (run, twin) if one is not None), judge.two_at_once(run.events, lives),
        f"after step {differ[0]} and {len(differ) - 1} others the run did not hold the twin's bits" if differ else "",
        "no step of the run and of its twin could be compared" if twin is not None and not compared else "",
    ]  # fmt: skip
    return CampaignResult(
        faults=tuple(_costs(struck, lives)),
        seconds=round(seconds, 1),
        stamped=mine,
        goodput=mine.goodput,
        ledger_goodput=_ledger_goodput(run),
        twin_goodput=theirs.goodput if theirs is not None else None,
        twin_ledger_goodput=_ledger_goodput(twin) if twin is not None else None,
        relative=_rate(mine) / _rate(theirs) if theirs is not None and _rate(theirs) else None,
        lost_per_fault_s=mine.lost_s / len(struck) if struck else None,
        compared=compared,
        lives=len(lives),
        wrong=next((text for text in wrong if text), ""),
        interrupted=interrupted,
    )


def _rate(time_of: StampedTime) -> float:
    """Return counted steps a second, from the first step on."""
    spent = time_of.wall_s - time_of.startup_s
    return time_of.steps / spent if spent > 0 else 0.0


def _costs(struck: Sequence[StruckFault], lives: Sequence[Life]) -> list[StruckFault]:
    """Return each fault with what it cost, where the next life of the ranks began before the next fault."""
    found = []
    for number, fault in enumerate(struck):
        until = next((later.time for later in struck[number + 1 :] if later.hurts), float("inf"))
        again = first_end_after(lives, fault.time)
        if fault.hurts and again is not None and again < until:
            fault = replace(
                fault, recovery_s=round(again - fault.time, 3), repeated_steps=repeated_after(lives, fault.time)
            )
        found.append(fault)
    return found


def _end_of(run: CampaignRun) -> str:
    """Return what is wrong with how a run ended, and with the number that its ranks computed."""
    try:
        verdict = json.loads((run.directory / "verdict.json").read_text())["verdict"]
        result: dict[str, Any] = json.loads(run.result.read_text())
    except (OSError, ValueError, KeyError):
        return f"{run.name} left no verdict or no result: see {run.output}"
    if verdict != "completed":
        return f"{run.name} ended with the verdict {verdict}"
    if result["values"] != [counting.expected(result["steps"])]:
        return f"{run.name} computed {result['values']} in {result['steps']} steps: a step was lost, doubled or torn"
    return ""


def _ledger_goodput(run: CampaignRun) -> float | None:
    try:
        return read_report(run.directory, time.time()).time.goodput
    except (ResilioError, OSError):
        return None


def as_fields(result: CampaignResult) -> dict[str, Any]:
    """Return the result for JSON."""
    return {**asdict(result), "passed": result.passed, "lost_s": result.stamped.lost_s}
