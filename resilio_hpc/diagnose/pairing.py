"""Who is paired with whom, round after round. Pure (DLR-3).

The first round pairs neighbours, whose links have least in common with others'; of an odd number of nodes the last one
computes by itself and meets a partner in the next round. (A triple would blame three nodes for one, and its times
compare with no pair's.) A pair that fails says only that one of the two is bad. So the next round pairs whoever is in
doubt with a node that is known to be good, and leaves all others in peace.

Where no pair passed, nodes meet their other neighbours first: after that all pairs of the ring have been tried but the
last of an odd number, which a third round tries. Where more nodes are good than bad, two good ones are side by side.

A round answers for as many nodes in doubt as there are good ones. So while no more than a quarter of the nodes is bad,
two rounds name everybody, however many there are; a third is for those that had no working partner in the first.
``rounds`` bounds all other cases.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from resilio_hpc.diagnose.observations import Outcome, Pair, Round, by_node
from resilio_hpc.diagnose.standing import standing


def next_round(nodes: Sequence[str], history: Sequence[Round], slow: Collection[str], rounds: int) -> tuple[Pair, ...]:
    """The pairs of the next round; none when nothing is left to find out, or nobody to find it out with.

    ``slow``: nodes that passed and were slow, which another round has to confirm; they are nobody's measure.
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
    """Neighbours that have not met: 1-2, 3-4, …, and the last with the first."""
    ends = (nodes[-1], nodes[0])
    if rounds_done == 1:
        odd = len(nodes) % 2 == 1
        return (*_neighbours(nodes[1:] if odd else nodes[1:-1]), (nodes[0],) if odd else ends)
    return (ends,) if rounds_done == 2 else ()


def _once_more_alone(history: Sequence[Round], doubtful: Sequence[str]) -> tuple[Pair, ...]:
    """Without any good node those that failed by themselves can still be looked at again."""
    seen = by_node({one.node for done in history for one in done}, history)
    return tuple((node,) for node in doubtful if [one.outcome for one in seen[node]] == [Outcome.ALONE])


def _with_testers(
    nodes: Sequence[str], history: Sequence[Round], doubtful: Sequence[str], testers: Sequence[str]
) -> tuple[Pair, ...]:
    """Each node in doubt with a tester of its own, a near one that it has not met; those left over have to wait."""
    place = {node: index for index, node in enumerate(nodes)}
    met = {node: [one.partner for one in seen] for node, seen in by_node(nodes, history).items()}
    free = sorted(testers, key=place.__getitem__)
    pairs: list[Pair] = []
    for node in sorted(doubtful, key=lambda name: (len(met[name]), place[name]))[: len(testers)]:
        tester = min(free, key=lambda name: (name in met[node], abs(place[name] - place[node])))
        free.remove(tester)
        pairs.append((node, tester))
    return tuple(pairs)
