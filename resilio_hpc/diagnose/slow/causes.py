"""The cause of a slow rank, from what its agent and those of its peers saw. Pure.

A cause is named only where it is large enough to explain the loss, and larger than on the rank's peers. Else the answer
is "unknown": the report then says where the rank was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct

from resilio_hpc.core import gpu_throttling
from resilio_hpc.core.compat import StrEnum
from resilio_hpc.diagnose.slow.rank_facts import WINDOW_S, NodeFacts, RankWindow

WINDOW_MS = 1000 * WINDOW_S
EXPLAINS = 0.3  # of the time that a rank is slower: what takes less is no cause of it
TIMES_PEERS = 3.0
LEAST_LOADS = 0.4  # of the looks
LEAST_RESENT = 20  # segments of a window
LEAST_TRIP_US = 5000
LEAST_BACKED_UP = 40  # percent of the looks


class SlowCause(StrEnum):
    """Why a rank is slow. The values are in the ledger."""

    THROTTLED = "cpu_throttled"
    NEIGHBOUR = "noisy_neighbour"
    COLLECTOR = "garbage_collection"
    LOADER = "data_loader"
    STORAGE = "storage"
    LINK = "link"
    GPU = "gpu_throttled"
    UNKNOWN = "unknown"


class RankPlace(Struct):
    """Where a rank was in its own work, as its stacks say. ``loads``: looks in which it waited for its data loader."""

    place: str = ""
    looks: int = 0
    loads: int = 0


class CauseFound(Struct, frozen=True):
    """A cause, and what was seen of it, in words."""

    cause: SlowCause
    evidence: str


def of_rank(mine: Sequence[RankWindow], peers: Sequence[RankWindow], lost: float, seen: RankPlace | None) -> CauseFound:
    """Return why a rank's own work takes longer.

    ``mine``: its recent windows; ``peers``: those of others; ``lost``: the share of its time that is too much;
    ``seen``: where its stacks were, if known.
    """
    least_ms = EXPLAINS * lost * WINDOW_MS
    found = []
    for cause, name, text in (
        (
            SlowCause.THROTTLED,
            "throttled",
            "its control group may not run for {share:.0%} of the time",
        ),
        (SlowCause.COLLECTOR, "collecting", "Python's garbage collector takes {share:.0%} of its time"),
        (SlowCause.NEIGHBOUR, "queued", "it waits for a free processor for {share:.0%} of the time"),
    ):
        value = _usual(mine, name)
        beside = _usual(peers, name)
        if value >= least_ms and value >= TIMES_PEERS * beside - 0.5 * lost * WINDOW_MS and value - beside >= least_ms:
            found.append(CauseFound(cause, text.format(share=min(1.0, value / WINDOW_MS))))
    if found:
        return found[0]
    blocked = _usual(mine, "blocked")
    loads = seen is not None and seen.looks > 0 and seen.loads >= LEAST_LOADS * seen.looks
    where = f" ({seen.loads} of {seen.looks} looks, at {seen.place})" if seen is not None and loads else ""
    if blocked >= 100 * EXPLAINS * lost and blocked >= TIMES_PEERS * _usual(peers, "blocked"):
        what = "its data loader waits" if loads else "it waits"
        return CauseFound(SlowCause.STORAGE, f"{what} in the kernel for storage in {blocked:.0f} % of the looks{where}")
    if loads:
        return CauseFound(SlowCause.LOADER, f"it waits for its data loader{where}")
    place = f"; it is at {seen.place}" if seen is not None and seen.place else ""
    return CauseFound(SlowCause.UNKNOWN, f"no cause was seen{place}")


def of_link(nodes: Mapping[str, Sequence[NodeFacts]], leader: str) -> tuple[str, CauseFound] | None:
    """Return the node whose link is slow, and what speaks for it; None where none stands out.

    ``nodes``: the recent windows of each. ``leader``: the controller's node, whose own answers cross no network.
    """
    resent = {node: _usual(facts, "resent") for node, facts in nodes.items()}
    queues = {node: _usual(facts, "backed_up") for node, facts in nodes.items()}
    trips = {node: _usual(facts, "trip") for node, facts in nodes.items() if node != leader}
    for values, least, text in (
        (resent, LEAST_RESENT, "sends {value:.0f} TCP segments again in " + f"{WINDOW_S} s, the others {{usual:.0f}}"),
        (queues, LEAST_BACKED_UP, "has data waiting to be sent in {value:.0f} % of looks, the others in {usual:.0f} %"),
        (trips, LEAST_TRIP_US, "answers to its heartbeats take {ms:.1f} ms, to those of the others {usual_ms:.1f} ms"),
    ):
        worst = max(values, key=lambda node: values[node], default="")
        others = [value for node, value in values.items() if node != worst]
        if others and values[worst] >= max(least, TIMES_PEERS * max(others)):
            usual = median(others)
            words = text.format(value=values[worst], usual=usual, ms=values[worst] / 1000, usual_ms=usual / 1000)
            return worst, CauseFound(SlowCause.LINK, words if values is trips else f"{worst} {words}")
    if len(trips) > 1 and min(trips.values()) >= LEAST_TRIP_US * 2:
        words = f"all answers to heartbeats cross its link, and take {median(trips.values()) / 1000:.1f} ms"
        return leader, CauseFound(SlowCause.LINK, words)
    return None


def of_gpus(nodes: Mapping[str, Sequence[NodeFacts]]) -> tuple[str, CauseFound] | None:
    """Return the one node whose GPUs are held down, and why; None where there is none, or another one, too.

    ``nodes``: the recent windows of each.
    """
    held = {node: count for node, facts in nodes.items() if (count := int(_usual(facts, "gpus_throttled"))) > 0}
    if len(held) != 1:
        return None
    ((node, count),) = held.items()
    bits = nodes[node][-1].throttle_reasons
    why = " and ".join(words for mask, words in gpu_throttling.WORDS.items() if bits & mask) or "the hardware"
    are = "is" if count == 1 else "are"
    return node, CauseFound(SlowCause.GPU, f"{count} of the GPUs of {node} {are} throttled by {why}")


def _usual(windows: Sequence[object], name: str) -> float:
    return float(median(getattr(window, name) for window in windows)) if windows else 0.0
