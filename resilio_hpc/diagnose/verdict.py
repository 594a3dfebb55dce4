"""From the rounds to the result: which nodes are named, and with what evidence. Pure (DLR-3).

A node that failed by itself twice is a fact, and named unless most nodes did: then they have a common cause. A node
that failed with a partner is an inference, which holds only where the good nodes are a majority. Otherwise nothing can
be told.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from resilio_hpc.diagnose import slowness
from resilio_hpc.diagnose.observations import Fault, Observation, Pair, Round, RoundOutcome, Times, by_node
from resilio_hpc.diagnose.policy import PairPolicy
from resilio_hpc.diagnose.result import CheckOutcome, CheckResult, NodeResult, State
from resilio_hpc.diagnose.slowness import Slow


@dataclass(frozen=True)
class Standing:
    """The state of knowledge. ``by_itself``: the bad nodes that were found without a partner."""

    good: frozenset[str]
    bad: frozenset[str]
    by_itself: frozenset[str]


def standing(history: Sequence[Round]) -> Standing:
    """Return which nodes are good or bad after these rounds."""
    good: set[str] = set()
    bad: set[str] = set()
    alone: set[str] = set()
    strikes: dict[str, int] = {}
    for done in history:
        before = frozenset(good)
        for seen in done:
            bad.discard(seen.node)
            if seen.outcome is RoundOutcome.PASSED and seen.partner:
                good.add(seen.node)
            elif _counts(seen, before):
                good.discard(seen.node)
                strikes[seen.node] = strikes.get(seen.node, 0) + 1
                if strikes[seen.node] > 1 and (seen.outcome is RoundOutcome.ALONE or seen.partner in before):
                    bad.add(seen.node)
                    (alone.add if seen.outcome is RoundOutcome.ALONE else alone.discard)(seen.node)
    return Standing(frozenset(good), frozenset(bad), frozenset(alone & bad))


def _counts(seen: Observation, good: frozenset[str]) -> bool:
    """Return whether the observation counts against the node itself."""
    if seen.outcome is RoundOutcome.TOGETHER:
        return seen.node not in good or seen.partner in good
    return seen.outcome is RoundOutcome.ALONE


BUSY = 0.5  # a node that waits for a CPU for more than this share of the time is mentioned
_WEIGHT: dict[Fault, int] = {"wrong_result": 6, "crashed": 5, "hung": 4, "silent": 3, "not_ready": 2, "absent": 1}
_SAID: dict[Fault, str] = {
    "absent": "its probe did not start",
    "not_ready": "its probe could not begin",
    "silent": "it went silent",
    "crashed": "its probe crashed",
    "hung": "its probe hung",
    "wrong_result": "it computed a wrong result",
    "failed": "its collective failed",
}


def pairs_of_next_round(
    nodes: Sequence[str], history: Sequence[Round], policy: PairPolicy
) -> tuple[tuple[str, ...], ...]:
    """Return the next pairs; none when all is known that can be."""
    slow = [one.node for one in slowness.find(history, policy) if not one.confirmed]
    if len(slow) > max(2, int(2 * policy.slow_share * len(nodes))):
        slow = []  # of a slow pair both are suspect; so many are another kind of node
    return next_round(nodes, history, slow, policy.rounds)


def judge(
    nodes: Sequence[str], history: Sequence[Round], policy: PairPolicy, seconds: float, late: bool = False
) -> CheckResult:
    """Return the result. ``late``: time ran out before all was known."""
    now = standing(history)
    suspects = slowness.find(history, policy)
    named, why = _named(nodes, now)
    slow = {one.node: one for one in suspects if one.confirmed and one.node not in named}
    if slowness.too_many(list(slow.values()), len(nodes), policy):
        why = why or f"{len(slow)} of {len(nodes)} nodes are slow: other hardware, or something that they share"
        slow = {}
    usual = _usual(history)
    seen = by_node(nodes, history)
    results = tuple(_node(node, seen[node], now, named, slow, usual) for node in nodes)
    unsure = [one.node for one in results if one.state == "unsure"]
    if not why and unsure and not named and not slow:
        why = _why_unsure(len(nodes), unsure)
    if late:
        why = f"time was up after {policy.budget_s:g} s{'; ' if why else ''}{why}"
    outcome: CheckOutcome = "found" if named or slow else "cannot_tell" if why else "fine"
    return CheckResult(outcome=outcome, why=why, nodes=results, rounds=len(history), seconds=round(seconds, 3))


def _named(nodes: Sequence[str], now: Standing) -> tuple[frozenset[str], str]:
    """Return the bad nodes that may be named, and why the others may not."""
    alone = now.by_itself if len(now.by_itself) <= len(nodes) / 2 else frozenset()
    majority = len(now.good) > len(nodes) / 2
    named = now.bad if majority else alone
    if now.bad - named:
        return named, (
            f"{len(now.bad)} of {len(nodes)} nodes failed and {len(now.good)} passed: without a majority that passed "
            "the fault may be something that they share"
        )
    return named, ""


def _why_unsure(count: int, unsure: Sequence[str]) -> str:
    if count == 1:
        return "there is one node: a collective needs two"
    if count == 2:
        return "there are two nodes: nothing shows which of them is at fault"
    return f"{len(unsure)} of {count} nodes could not be cleared: no good node was left to test them with, or no time"


def _node(
    node: str,
    seen: Sequence[Observation],
    now: Standing,
    named: frozenset[str],
    slow: dict[str, Slow],
    usual: tuple[float | None, float | None],
) -> NodeResult:
    failures = [one for one in seen if one.fault is not None]
    times = next((one.times for one in seen if one.times.compute), Times())
    collective = next((one.times.collective for one in seen if one.times.collective), ())
    compute_s, collective_s = _best(times.compute), _best(collective)
    state: State = "healthy" if node in now.good else "unsure"
    fault: Fault | None = None
    faults = [one.fault for one in failures if one.fault is not None]
    evidence = _all_said(failures) + (", then it passed" if failures and state == "healthy" else "")
    if node in named:
        state = "bad"
        worst: Fault = max(faults, key=_weight)
        fault = worst
    elif node in slow:
        state = "slow"
        evidence = f"{slow[node].what} takes {slow[node].ratio:.1f} times the median of all nodes, in two rounds"
    elif state == "unsure" and not failures:
        waited = any(one.outcome is RoundOutcome.WAITED for one in seen)
        evidence = "its partner failed, and no other was left" if waited else "not tested with a partner"
    elif state == "healthy" and times.waited > BUSY:
        evidence = evidence or f"others used its CPUs: it waited {times.waited:.0%} of the time"
    return NodeResult(
        node=node, state=state, fault=fault, what=slow[node].what if state == "slow" else "", evidence=evidence,
        device=times.device, compute_s=compute_s, compute_ratio=_ratio(compute_s, usual[0]),
        collective_s=collective_s, collective_ratio=_ratio(collective_s, usual[1]),
        waited=times.waited, partners=tuple(one.partner for one in seen if one.partner),
    )  # fmt: skip


def _weight(fault: Fault) -> int:
    return _WEIGHT.get(fault, 0)


def _all_said(failures: Sequence[Observation]) -> str:
    parts = []
    for one in failures:
        assert one.fault is not None
        beside = f" with {one.partner}" if one.outcome is RoundOutcome.TOGETHER else ""
        own_work = one.fault == "failed" and one.outcome is RoundOutcome.ALONE
        said = "its own work failed" if own_work else _SAID[one.fault]
        parts.append(f"{said}{beside}{f' ({one.detail})' if one.detail else ''}")
    return "; ".join(dict.fromkeys(parts))


def _usual(history: Sequence[Round]) -> tuple[float | None, float | None]:
    first = history[0] if history else ()
    compute = [min(one.times.compute) for one in first if one.times.compute]
    collective = [min(one.times.collective) for one in first if one.times.collective]
    return (median(compute) if compute else None), (median(collective) if collective else None)


def _best(blocks: Sequence[float]) -> float | None:
    return min(blocks) if blocks else None


def _ratio(value: float | None, usual: float | None) -> float | None:
    return round(value / usual, 3) if value is not None and usual else None


def next_round(nodes: Sequence[str], history: Sequence[Round], slow: Collection[str], rounds: int) -> tuple[Pair, ...]:
    """Return the pairs of the next round; none when nothing is left to find out, or no node to find it out with.

    ``slow``: nodes that passed and were slow, which another round has to confirm; they are no other node's measure.
    """
    if not history:
        return _neighbours(nodes)
    now = standing(history)
    doubtful = [node for node in nodes if node in slow or node not in now.good | now.bad]
    testers = [node for node in nodes if node in now.good and node not in slow]
    if not doubtful or len(history) >= rounds:
        return ()
    if testers:
        return _with_testers(nodes, history, doubtful, testers)
    met = {frozenset((seen.node, seen.partner)) for done in history for seen in done}
    ring = _rest_of_the_ring(nodes, len(history))
    if any(len(pair) == 2 and frozenset(pair) not in met for pair in ring):
        return ring
    return _once_more_alone(history, doubtful)


def _neighbours(nodes: Sequence[str]) -> tuple[Pair, ...]:
    return tuple(tuple(nodes[index : index + 2]) for index in range(0, len(nodes), 2))


def _rest_of_the_ring(nodes: Sequence[str], rounds_done: int) -> tuple[Pair, ...]:
    """Return neighbours that have not met: 1-2, 3-4, …, and the last with the first."""
    ends = (nodes[-1], nodes[0])
    if rounds_done == 1:
        odd = len(nodes) % 2 == 1
        return (*_neighbours(nodes[1:] if odd else nodes[1:-1]), (nodes[0],) if odd else ends)
    return (ends,) if rounds_done == 2 else ()


def _once_more_alone(history: Sequence[Round], doubtful: Sequence[str]) -> tuple[Pair, ...]:
    """Return, without any good node, those that failed by themselves, to be looked at again."""
    seen = by_node({one.node for done in history for one in done}, history)
    return tuple((node,) for node in doubtful if [one.outcome for one in seen[node]] == [RoundOutcome.ALONE])


def _with_testers(
    nodes: Sequence[str], history: Sequence[Round], doubtful: Sequence[str], testers: Sequence[str]
) -> tuple[Pair, ...]:
    """Return each node in doubt with its own tester, a near one that it has not met; those left over have to wait."""
    place = {node: index for index, node in enumerate(nodes)}
    met = {node: [one.partner for one in seen] for node, seen in by_node(nodes, history).items()}
    free = sorted(testers, key=place.__getitem__)
    pairs: list[Pair] = []
    for node in sorted(doubtful, key=lambda name: (len(met[name]), place[name]))[: len(testers)]:
        at = bisect.bisect(free, place[node], key=place.__getitem__)
        reach = len(met[node]) + 1  # among so many neighbours on each side, one that it has not met, if any is left
        near = range(max(0, at - reach), min(len(free), at + reach))
        best = min(near, key=lambda index: (free[index] in met[node], abs(place[free[index]] - place[node])))
        pairs.append((node, free.pop(best)))
    return tuple(pairs)
