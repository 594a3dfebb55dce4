"""Whether the kernel killed a rank for lack of memory: by its counts, of the job and of the machine."""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.diagnose.causes.pattern_table import CauseClass, find
from resilio_hpc.launch.workers.output.oom_kills import SAME_S, OomKills

JOB = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"


class Node:
    """A captured tree, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 0.0
        self._write("proc/self/cgroup", "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
        self._write(f"{JOB}/memory.max", f"{2 << 30}\n")
        self._write(f"{JOB}/memory.current", f"{2 << 30}\n")
        self.kills(0, 0)

    def _write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def kills(self, job: int, machine: int) -> None:
        self._write(f"{JOB}/memory.events", f"max 3\noom 1\noom_kill {job}\n")
        self._write("proc/vmstat", f"oom_kill {machine}\n")

    def watch(self) -> OomKills:
        return OomKills(self.root, lambda: self.now)


def test_a_kill_of_the_job_names_its_limit(tmp_path: Path) -> None:
    node = Node(tmp_path)
    watch = node.watch()
    assert watch.why() == ""
    node.kills(1, 1)
    assert watch.why() == (
        "the kernel's out-of-memory killer ended one process in this job (oom_kill event): the memory limit of its "
        "cgroup, 2 GiB, was reached"
    )


def test_a_kill_elsewhere_on_the_machine(tmp_path: Path) -> None:
    node = Node(tmp_path)
    watch = node.watch()
    node.kills(0, 2)
    assert watch.why() == "the kernel's out-of-memory killer ended 2 processes on this node: memory was full"


def test_ranks_that_end_together_have_one_cause_and_later_ones_their_own(tmp_path: Path) -> None:
    node = Node(tmp_path)
    watch = node.watch()
    node.kills(1, 1)
    assert watch.why() != ""
    node.now += SAME_S / 2
    assert watch.why() != ""
    node.now += 2 * SAME_S
    assert watch.why() == ""
    node.kills(2, 2)
    assert "one process in this job" in watch.why()


def test_where_nothing_is_counted_nothing_is_said(tmp_path: Path) -> None:
    assert OomKills(tmp_path).why() == ""


def test_a_diagnosis_knows_the_cause(tmp_path: Path) -> None:
    node = Node(tmp_path)
    watch = node.watch()
    node.kills(1, 1)
    text = f"killed by SIGKILL: {watch.why()}"
    found = find(text)
    assert found is not None
    assert found.cause is CauseClass.OOM_HOST
