"""Whether the judge of cascades names the origin, beside the older rule: the earliest end that reads like no echo."""

from __future__ import annotations

from resilio_hpc.diagnose.cascade.clocks import UNKNOWN_S
from resilio_hpc.diagnose.cascade.death import Death, death_of
from resilio_hpc.diagnose.cascade.verdict import CONFIDENT, judge
from resilio_hpc.launch.protocol.message_parts import RankFailure
from resilio_hpc.launch.protocol.root_cause import is_consequence, may_be_consequence
from tests.support.diagnose.machines import Cascade

OUTCOMES = ("right", "declined", "wrong", "wrong, and sure of it")


def deaths_of(case: Cascade) -> list[Death]:
    """Return the reports of a case as the controller reads them: times on its own clock."""
    found = []
    for one in case.reports:
        at, uncertain_s = one.time - case.unix_ahead_s, 0.0
        if one.kind != "node_lost":
            at, uncertain_s = case.clocks[one.node].to_local(one.time, case.now) or (at, UNKNOWN_S)
        found.append(
            death_of(one.rank, one.node, one.kind, at, uncertain_s, one.signal, one.message, one.traceback, one.groups,
                     one.log)
        )  # fmt: skip
    return found


def outcome(case: Cascade, deaths: list[Death]) -> str:
    """Return which of OUTCOMES the judge's answer is."""
    verdict = judge(deaths, case.addresses, case.size)
    if not verdict.primary:
        return "right" if case.none_is_right else "declined"
    if is_right(case, verdict.rank, verdict.node):
        return "right"
    return "wrong, and sure of it" if verdict.confidence >= CONFIDENT else "wrong"


def older_is_right(case: Cascade) -> bool:
    """Return whether the older rule names the origin, on the nodes' own clocks: lost node, no echo, earliest."""
    lost = [one for one in case.reports if one.kind == "node_lost"]
    if lost:
        return is_right(case, -1, lost[0].node)
    failures = [
        RankFailure(one.node, one.rank, 0, one.kind, one.time, one.exit_code, one.signal, one.message, one.traceback)
        for one in case.reports
    ]
    first = min(failures, key=lambda failure: (is_consequence(failure), may_be_consequence(failure), failure.time))
    return is_right(case, first.rank, first.node)


def is_right(case: Cascade, rank: int, node: str) -> bool:
    """Return whether this is the origin: the rank, or the node where the node died or its rank left no report."""
    if case.nodes:
        return node in case.nodes
    if rank >= 0:
        return rank in case.origins
    per_node = min(8, case.size // 2)
    silent = not any(one.rank in case.origins for one in case.reports)
    return silent and node in {f"n{origin // per_node + 1:03d}" for origin in case.origins}
