"""Faults are kept by several writers, with torn lines and full disks; and are not believed where others could write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.core.errors import HealthError
from resilio_hpc.slurm.node_faults.fault import NodeFault
from resilio_hpc.slurm.node_faults.ledger import FaultLedger, users_directory
from tests.support.mounts import mounted
from tests.support.requirements import need_root
from tests.support.waiting import PATIENCE_S


def fault(number: int, node: str = "n1") -> NodeFault:
    return NodeFault(time=float(number), node=node, kind="node-lost", evidence=f"the {number}th")


def numbers(ledger: FaultLedger) -> list[int]:
    return sorted(int(one.time) for one in ledger.read().faults)


def test_what_is_added_is_read_again_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "down"
    assert FaultLedger(folder).read().faults == ()
    assert FaultLedger(folder, "a").append([fault(1), fault(2)]) == 2
    FaultLedger(folder, "b/../c").append([fault(3)])
    assert FaultLedger(folder, "a").append([]) == 0
    assert numbers(FaultLedger(folder)) == [1, 2, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["a.jsonl", "b_.._c.jsonl"]


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    ledger = FaultLedger(tmp_path, "a")
    ledger.append([fault(1)])
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"time":2.0,"node":"n1","ki')  # its writer was killed here
    ledger.append([fault(3)])
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"\0\0\0\xff no line at all\n")
    ledger.append([fault(4)])
    assert numbers(ledger) == [1, 3, 4]


ADDS_MANY = """
import sys
from pathlib import Path
from resilio_hpc.slurm.node_faults.fault import NodeFault
from resilio_hpc.slurm.node_faults.ledger import FaultLedger
folder, host, first = sys.argv[1:]
for number in range(int(first), int(first) + 40):
    FaultLedger(Path(folder), host).append([NodeFault(time=float(number), node="n1", kind="node-lost")])
"""


def test_several_writers_lose_nothing(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", ADDS_MANY, str(tmp_path)]
    writers = [subprocess.Popen([*argv, f"h{n % 2}", str(1000 * n)]) for n in range(4)]
    assert [writer.wait(PATIENCE_S) for writer in writers] == [0, 0, 0, 0]
    assert numbers(FaultLedger(tmp_path)) == [1000 * n + i for n in range(4) for i in range(40)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with mounted(tmp_path / "small", "size=64k,mode=755") as directory:
        yield directory


def test_a_full_disk_is_told_and_costs_what_did_not_fit(small_disk: Path) -> None:
    ledger = FaultLedger(small_disk, "a")
    kept = 0
    with pytest.raises(HealthError, match=r"could not be kept in .*No space left"):
        for number in range(10_000):
            ledger.append([fault(number)])
            kept = number
    assert numbers(ledger) in (list(range(kept + 1)), list(range(kept + 2)))  # its newline alone may be missing
    os.truncate(small_disk / "a.jsonl", (small_disk / "a.jsonl").stat().st_size - 8192)  # somebody makes room
    ledger.append([fault(20_000)])
    assert numbers(ledger)[-1] == 20_000


def test_an_old_file_is_put_aside_and_still_read(tmp_path: Path) -> None:
    ledger = FaultLedger(tmp_path, "a", most_bytes=1000)
    for number in range(20):
        ledger.append([fault(number)])
    assert numbers(ledger)[-1] == 19
    assert len(numbers(ledger)) >= 10
    assert sorted(path.name for path in tmp_path.iterdir()) in (["a.1.jsonl"], ["a.1.jsonl", "a.jsonl"])
    assert all(path.stat().st_size < 1500 for path in tmp_path.iterdir())


def test_links_pipes_and_large_names_are_no_files_of_the_ledger(tmp_path: Path) -> None:
    ledger, elsewhere = FaultLedger(tmp_path / "here", "a"), tmp_path / "elsewhere.jsonl"
    ledger.append([fault(1)])
    FaultLedger(tmp_path, "elsewhere").append([fault(2)])
    (tmp_path / "here" / "b.jsonl").symlink_to(elsewhere)
    os.mkfifo(tmp_path / "here" / "c.jsonl")
    (tmp_path / "here" / "d.jsonl").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("{}")
    kept = ledger.read()
    assert [one.time for one in kept.faults] == [1.0]
    assert len(kept.problems) == 3
    (tmp_path / "here" / "a.jsonl").unlink()
    (tmp_path / "here" / "a.jsonl").symlink_to(elsewhere)
    with pytest.raises(HealthError):
        ledger.append([fault(3)])
    assert len(elsewhere.read_text().splitlines()) == 1


def test_what_others_may_write_is_not_believed(tmp_path: Path) -> None:
    ledger = FaultLedger(tmp_path / "faults", "a")
    ledger.append([fault(1)])
    ledger.directory.chmod(0o777)
    with pytest.raises(HealthError, match="may be written by others"):
        ledger.read()
    ledger.directory.chmod(0o755)
    (ledger.directory / "a.jsonl").chmod(0o666)
    assert ledger.read().faults == ()
    assert "not believed" in ledger.read().problems[0]


def test_what_somebody_else_owns_is_not_believed(tmp_path: Path) -> None:
    need_root()
    ledger = FaultLedger(tmp_path / "faults", "a")
    ledger.append([fault(1)])
    os.chown(ledger.directory / "a.jsonl", 65534, 65534)
    assert ledger.read().faults == ()
    os.chown(ledger.directory, 65534, 65534)
    with pytest.raises(HealthError, match="belongs to user 65534"):
        ledger.read()


def test_a_users_ledger_is_beside_the_runs_unless_told_otherwise() -> None:
    run = Path("/scratch/me/runs/7")
    assert users_directory({}, run) == Path(f"/scratch/me/runs/resilio-node-faults-{os.geteuid()}")
    assert users_directory({"RESILIO_NODE_FAULTS": "/home/me/faults"}, run) == Path("/home/me/faults")
    assert users_directory({"RESILIO_NODE_FAULTS": "off"}, run) is None
