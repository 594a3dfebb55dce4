"""Running checks: what hangs is ended or left and named, what dies or talks nonsense is no fault of the node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from resilio_hpc.prolog_epilog.base.check import Absent, Check, Fault, Former, Result, Thresholds, Unreadable
from resilio_hpc.prolog_epilog.base.isolated import Child, Ended, Mark, _process_stat, gather, still_there
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.probe import Probe, Source
from resilio_hpc.prolog_epilog.run.runner import CheckRunner, RunMemory
from tests.support.prolog_epilog.hung_children import hung_child
from tests.support.waiting import until


def check(name: str = "one", source: str = "a", budget_s: float = 5.0, **more: Any) -> Check:
    row: dict[str, Any] = {"contexts": ("health",), "on_fail": "drain", "severity": "error", **more}
    return Check(id=name, source=source, budget_s=budget_s, reason="r", summary="s", origin="o", **row)


def examine(
    checks: list[Check], fetch: Callable[[NodeView], object], memory: RunMemory | None = None, **more: Any
) -> list[Result]:
    sources = {one.source: Source(fetch) for one in checks}
    probes = {one.id: Probe.of(lambda reading, limits: reading) for one in checks}
    return CheckRunner(sources, probes, NodeView(), lambda: 1000.0, memory=memory or RunMemory(), **more).run(checks)


def test_checks_of_one_source_share_one_reading() -> None:
    fault = [Fault("it is broken", "dev0")]
    one, two = examine([check("one"), check("two")], lambda node: [Fault(f"{os.getpid()}")])
    assert (one.status, two.status) == ("fail", "fail")
    assert one.faults == two.faults != (Fault(str(os.getpid())),)  # judged in one child, and not here
    assert examine([check()], lambda node: fault)[0].faults == tuple(fault)


def test_a_source_that_dies_or_cannot_be_read_is_unknown() -> None:
    def dies(node: NodeView) -> object:
        node.mark("nvmlInit")
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    def unreadable(node: NodeView) -> object:
        raise Unreadable("/sys/x: Permission denied")

    def absent(node: NodeView) -> object:
        raise Absent("no such hardware")

    def mistaken(node: NodeView) -> object:
        return [1 // 0]

    told = [
        (one.status, one.note) for fetch in (dies, unreadable, absent, mistaken) for one in examine([check()], fetch)
    ]
    assert told == [
        ("unknown", "the check was ended by signal 9 at nvmlInit"),
        ("unknown", "/sys/x: Permission denied"),
        ("absent", "no such hardware"),
        ("unknown", "the check itself failed: ZeroDivisionError: integer division or modulo by zero"),
    ]


def test_all_take_no_longer_than_their_budgets_together_and_others_answer() -> None:
    def hangs(node: NodeView) -> Iterable[Fault]:
        if node.target == "good":
            return []
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        return []

    targets = ["bad1", "good", "bad2", "bad3"]
    sources = {"a": Source(hangs, lambda node: targets)}
    probes = {"one": Probe.of(lambda reading, limits: reading)}
    budgets = iter([0.1, 30.0, 0.1, 0.1])  # the good one answers in time, however late it gets its turn
    asked: list[float] = []

    def child(work: Callable[[Mark], bytes], budget_s: float) -> Child:
        asked.append(budget_s)
        return Child(work, next(budgets))

    (result,) = CheckRunner(sources, probes, NodeView(), lambda: 1000.0, child=child).run([check(budget_s=5.0)])
    assert asked == [5.0] * 4
    assert sorted(fault.device for fault in result.faults) == ["bad1", "bad2", "bad3"]
    assert result.status == "timeout"


def test_who_cannot_be_killed_is_left_and_not_joined_by_another() -> None:
    """A child in state D, for which one stands in that no signal reaches: the signal is not sent."""
    immortal = partial(hung_child, kill=lambda pid, number: None, slow_death_s=0.05)
    memory, started = RunMemory(), []

    def hangs(node: NodeView) -> object:
        node.mark("/scratch")
        time.sleep(60)
        return []

    (first,) = examine([check(budget_s=0.1)], hangs, memory, child=immortal)
    (stuck,) = memory.stuck.values()
    started.append(stuck.pid)
    assert f"its child {stuck.pid} cannot be killed (state " in first.faults[0].evidence
    (second,) = examine([check(budget_s=0.1)], hangs, memory, child=immortal)
    assert f"no answer for 0 s, child {stuck.pid} cannot be killed" in second.faults[0].evidence
    assert [one.pid for one in memory.stuck.values()] == started
    os.kill(stuck.pid, signal.SIGKILL)
    until(lambda: not still_there(stuck.pid, stuck.started), "the end of the stuck child")
    (third,) = examine([check()], lambda node: [], memory)
    assert (third.status, memory.stuck) == ("pass", {})


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    me = os.getpid()
    started = int(Path(f"/proc/{me}/stat").read_text().rpartition(")")[2].split()[19])
    assert still_there(me, started)
    assert not still_there(me, started + 1)


def test_what_talks_without_end_is_ended(tmp_path: Path) -> None:
    told: list[Ended] = []

    def talks(mark: Mark) -> bytes:
        mark("x" * 5000)
        return b"x" * (4 << 20)

    children = [Child(talks, 20.0)]
    gather(children, lambda child, ended: told.append(ended))
    (ended,) = told
    assert ended.answer is None and not ended.overdue and len(ended.touched) <= 300


def test_children_end_with_whoever_started_them() -> None:
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        child = Child(lambda mark: time.sleep(60) or b"", 60.0)
        os.write(write, str(child.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    pid = int(os.read(read, 32))
    os.close(read)
    os.waitpid(middle, 0)
    # it stays a zombie until the system's first process looks at it
    until(lambda: (_process_stat(pid) or "Z")[0] == "Z", "the end of the child")


def test_a_check_remembers_and_begins_anew_when_it_is_cleared() -> None:
    def judge(reading: Any, limits: Thresholds, former: Former) -> tuple[Iterable[Fault], object]:
        return [Fault(f"{former.kept} {former.cleared_s:g}")], "kept"

    memory = RunMemory()
    runner = CheckRunner(
        {"a": Source(lambda node: 0)}, {"one": Probe(judge)}, NodeView(), lambda: 1000.0, memory=memory
    )
    said = [runner.run([check()])[0].faults[0].evidence for _ in range(2)]
    memory.clear("one", 900.0)
    said.append(runner.run([check()])[0].faults[0].evidence)
    assert said == ["None -1", "kept -1", "None 900"]
