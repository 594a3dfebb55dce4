"""Whether a drill was passed: verdict, number, ledger, and the proof that no two rounds trained at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.ledger import Event
from resilio_hpc.drills.kind import Drill
from resilio_hpc.drills.script import counting
from resilio_hpc.drills.stamps import Life, overlap, steps_between, steps_left_out


def judge(
    drill: Drill, events: Sequence[Event], lives: Sequence[Life], run: Path, result: Path, acts_at: Sequence[float],
    struck: int = -1, slowed: str = "",
) -> None:  # fmt: skip
    """Raise ResilioError with the first thing that is wrong.

    ``acts_at``: when each act was done; ``struck``: the rank that was struck; ``slowed``: the node that was made slow.
    """
    verdict = _read(run / "verdict.json", "verdict").get("verdict")
    if verdict != drill.verdict and not (drill.verdict == "cancelled" and verdict == "terminated"):
        raise ResilioError(f"the verdict is {verdict}, not {drill.verdict}")
    for wrong in (
        two_at_once(events, lives), _kinds(drill, events), _jobs(drill, events), _hang(drill, events, struck),
        _fault(drill, events), _uncommitted(drill, events), _tests(events, slowed),
        _slow(drill, events, struck, acts_at),
    ):  # fmt: skip
        if wrong:
            raise ResilioError(wrong)
    if drill.name == "scancel" and not any(event.kind == "stop_agreed" for event in events):
        raise ResilioError("the ranks did not agree on a step to save before they ended")
    if drill.steps_meanwhile:
        done = steps_between(lives, acts_at[0], acts_at[-1])
        if done < drill.steps_meanwhile:
            raise ResilioError(f"{done} steps were done during the fault, not {drill.steps_meanwhile}")
    if drill.verdict == "completed":
        _judge_result(drill, _read(result, "result"))


def two_at_once(events: Sequence[Event], lives: Sequence[Life]) -> str:
    """Return what speaks against "one round trains at a time, no step is lost or durable twice"; "" when nothing does.

    Pure.

    The ranks' own stamps decide it; the ledger must tell the same, and there must be stamps of every round it tells of.
    """
    stamped = {life.round for life in lives}
    trained = {int(event.fields["round"]) for event in events if event.kind == "first_step"}
    if not trained <= stamped:
        return f"the ranks left no stamps of round {min(trained - stamped)}"
    if not lives:
        return "no rank left a stamp"
    return rounds_overlap(events) or overlap(lives) or steps_left_out(lives) or commits_repeated(events)


def _read(path: Path, what: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        raise ResilioError(f"there is no {what}") from None
    return dict(found)


def _kinds(drill: Drill, events: Sequence[Event]) -> str:
    found = [str(event.fields.get("kind")) for event in events if event.kind == "recovered"]
    if drill.kinds and not set(drill.kinds) & set(found):
        return f"the ledger holds recoveries {found}, none of {', '.join(drill.kinds)}"
    if drill.told and not any(event.kind == drill.told for event in events):
        return f"the ledger does not tell that something was {drill.told}"
    return ""


def _hang(drill: Drill, events: Sequence[Event], struck: int) -> str:
    """Return what is wrong with the blame of a hang."""
    acted = [event.fields for event in events if event.kind == "hang" and event.fields["acted"]]
    if not drill.hang:
        return f"a hang was seen where there was none: {acted[0]['evidence']}" if acted else ""
    if not acted or acted[0]["kind"] != drill.hang:
        return f"the ledger holds hangs {[one['kind'] for one in acted]}, not {drill.hang}"
    wanted = drill.blamed if drill.blamed >= 0 else struck
    if drill.hang != "deadlock" and acted[0]["ranks"] != [wanted]:
        return f"ranks {acted[0]['ranks']} were blamed, not {wanted}: {acted[0]['evidence']}"
    return ""


def _fault(drill: Drill, events: Sequence[Event]) -> str:
    """Return what is wrong with the blame of an error, and with what followed from it."""
    if not drill.fault:
        return ""
    blamed = [event.fields for event in events if event.kind == "rank_failed" and not event.fields.get("echo")]
    if not blamed or (blamed[0]["rank"], blamed[0].get("class")) != (drill.blamed, drill.fault):
        found = [(one["rank"], one.get("class")) for one in blamed]
        return f"the failures are {found}, not one of rank {drill.blamed} of class {drill.fault}"
    rungs = [event.fields["rung"] for event in events if event.kind == "decision"]
    if drill.moved != ("replace_node" in rungs):
        return f"the decisions were {', '.join(rungs)}"
    starts = [bool(event.fields.get("trace")) for event in events if event.kind == "start"]
    wanted = [False, drill.traced]
    return "" if starts == wanted else f"libraries wrote what they do in rounds {starts}, not {wanted}"


def _uncommitted(drill: Drill, events: Sequence[Event]) -> str:
    """Return what is wrong with a restart that was to go on from other nodes' memory, beyond what was committed."""
    newest, found = -1, []
    for event in sorted(events, key=lambda event: event.time):
        if event.kind == "committed":
            newest = max(newest, int(event.fields["step"]))
        elif event.kind == "start" and event.fields.get("fetched"):
            found.append(f"{event.fields['restore']} by {event.fields['fetched']}, of which {newest} was committed")
            source, _, step = str(event.fields["restore"]).partition(":")
            if source == "memory" and int(step) > newest and "committed" not in event.fields["fetched"].values():
                return ""
    return f"no restart went on from an uncommitted step in other nodes' memory: {found}" if drill.uncommitted else ""


def _tests(events: Sequence[Event], slowed: str) -> str:
    """Return what is wrong with the tests of nodes: each has to name the slow node, and no other."""
    for tested in (event.fields for event in events if event.kind == "tested"):
        found = [*tested.get("bad", []), *tested.get("slow", [])]
        if found != ([slowed] if slowed else []):
            return f"a test named {found}, not {slowed or 'none'}: {tested['outcome']} {tested['why']}"
    return ""


def _slow(drill: Drill, events: Sequence[Event], struck: int, acts_at: Sequence[float]) -> str:
    """Return what is wrong with what was told of slow ranks."""
    told = [event for event in events if event.kind == "slow" and event.fields["ranks"]]
    early = [event for event in told if not acts_at or event.time < acts_at[0]]
    if early:
        return f"a rank was called slow that was not: {early[0].fields}"
    if not drill.slow:
        return ""
    if not told:
        return "the ledger does not tell of a slow rank"
    first = told[0].fields
    of_node = [event.fields for event in events if event.kind == "ranks" and str(struck) in event.fields["pids"]]
    node = of_node[0]["node"] if of_node else ""
    one_rank = drill.slow == "cpu_throttled"  # the other causes meet all ranks of the node
    if first["nodes"] != [node] or first["cause"] != drill.slow or (one_rank and first["ranks"] != [struck]):
        found = f"ranks {first['ranks']} on {first['nodes']} are slow for {first['cause']} ({first['evidence']})"
        return f"{found}, not {struck} on {node} for {drill.slow}"
    return ""


def _jobs(drill: Drill, events: Sequence[Event]) -> str:
    took_part = parts(events)
    return f"{took_part} job(s) took part, not {drill.jobs}" if took_part < drill.jobs else ""


def parts(events: Sequence[Event]) -> int:
    """How many jobs took part; a requeued job is another part of the run, and its supervisor another writer. Pure."""
    return len({event.writer.split("-supervisor")[0] for event in events if event.kind == "launch"})


def _judge_result(drill: Drill, result: dict[str, Any]) -> None:
    right = [counting.expected(result["steps"])]
    if result["values"] != right:
        raise ResilioError(f"the result is {result['values']}, not {right}: a step was lost, doubled or torn")
    if drill.world_size and result["world_size"] != drill.world_size:
        raise ResilioError(f"{result['world_size']} ranks finished the run, not {drill.world_size}")


def rounds_overlap(events: Sequence[Event]) -> str:
    """Whether ranks of two rounds ran on one node at once, by the ledger; "" when not. Pure.

    On each node the ranks of a round must have been stopped before those of a later one start.
    """
    running: dict[str, int] = {}
    for event in events:
        node = str(event.fields.get("node", ""))
        if event.kind == "ranks":
            number = int(event.fields["round"])
            if running.get(node, number) != number:
                return f"on {node} ranks of round {number} started beside those of round {running[node]}"
            running[node] = number
        elif event.kind in ("ranks_stopped", "agent", "spawner_died"):
            running.pop(node, None)
    return ""


def commits_repeated(events: Sequence[Event]) -> str:
    """Whether a step became durable twice, or training went back behind a durable one; "" when not. Pure."""
    newest, epoch = -1, -1
    begun_at: dict[int, int] = {}  # round: the newest commit when it was ordered to start
    for event in sorted(events, key=lambda event: event.time):
        if event.kind == "committed":
            step, by = int(event.fields["step"]), int(event.fields.get("epoch", 0))
            if step <= newest:
                if by < epoch:  # a controller that was stopped records what was durable before
                    continue
                return f"step {step} was committed after step {newest}"
            newest, epoch = step, by
        elif event.kind == "start":
            begun_at[int(event.fields["round"])] = newest
        elif event.kind == "first_step":
            durable = begun_at.get(int(event.fields["round"]), -1)
            if int(event.fields["restored"]) < durable:
                return f"round {event.fields['round']} began at {event.fields['restored']}, step {durable} was durable"
    return ""
