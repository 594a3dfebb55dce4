"""Which nodes differ from the others, and in what. Pure: what the agents reported goes in."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from msgspec import Struct

MOST_GROUPS = 8


class NodeDifference(Struct, frozen=True):
    """Nodes that differ in the same way. ``facts``: name → (the value there, the value of most others)."""

    nodes: tuple[str, ...]
    facts: tuple[tuple[str, str, str], ...]


def differences(reports: Mapping[str, Mapping[str, str]]) -> list[NodeDifference]:
    """Return the nodes whose facts are not those of most nodes, those that differ alike together.

    Where as many nodes have one value as another, the value of the node that was first counts as usual. What fewer
    than two nodes report is not compared.
    """
    if len(reports) < 2:
        return []
    odd: defaultdict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for name in sorted({name for facts in reports.values() for name in facts}):
        counts = Counter(facts.get(name, "none") for facts in reports.values())
        if len(counts) == 1:
            continue
        usual = counts.most_common(1)[0][0]
        for node, facts in reports.items():
            if facts.get(name, "none") != usual:
                odd[node].append((name, facts.get(name, "none"), usual))
    groups: defaultdict[tuple[tuple[str, str, str], ...], list[str]] = defaultdict(list)
    for node, found in odd.items():
        groups[tuple(found)].append(node)
    all_found = [NodeDifference(tuple(nodes), facts) for facts, nodes in groups.items()]
    return sorted(all_found, key=lambda one: (-len(one.facts), one.nodes))[:MOST_GROUPS]
