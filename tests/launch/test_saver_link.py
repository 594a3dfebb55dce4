"""A saver that does not read must not hold up the agent: what does not fit into its pipe waits."""

from __future__ import annotations

import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.ckpt.saver import messages
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.launch.agent.snapshots import saver_link
from resilio_hpc.launch.agent.snapshots.saver_link import SaverLink
from tests.support.waiting import until

NODES = 3000


@pytest.fixture
def link(tmp_path: Path) -> Iterator[SaverLink]:
    link = SaverLink(tmp_path / "saver.log")
    link.start()
    yield link
    link.close()


def commit(directory: Path, step: int) -> messages.Commit:
    """Of a step of many nodes: far more than a pipe holds."""
    records = [ShardRecord(number, f"node-{number}.h5", 1, "own", ()) for number in range(NODES)]
    return messages.Commit(step, 1, 0, NODES, str(directory), records)


def stop(link: SaverLink) -> None:
    """It hangs, as on a file system that does not answer."""
    assert link._process is not None
    link._process.send_signal(signal.SIGSTOP)


def go_on(link: SaverLink) -> None:
    """It does not hang any more."""
    assert link._process is not None
    link._process.send_signal(signal.SIGCONT)


def wait_until_stopped(link: SaverLink) -> None:
    """Until it stands still."""
    assert link._process is not None
    stat = Path(f"/proc/{link._process.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "a saver that stands still")


def answers(link: SaverLink, count: int) -> list[messages.Progress | messages.Answer]:
    """As the agent's loop does."""
    return [answer for _, answer in heard(link, count)]


def heard(link: SaverLink, count: int) -> list[tuple[saver_link.SaverRequest, Any]]:
    """With the requests that they belong to."""
    found: list[tuple[saver_link.SaverRequest, Any]] = []

    def reached() -> bool:
        full = link.full_fileno
        select.select([link.fileno()], [] if full is None else [full], [], 0.1)
        link.push()
        found.extend(link.receive())
        return len(found) >= count

    until(reached, f"{count} answers", lambda: found, poll_s=0.0)
    return found


def test_a_long_request_to_a_saver_that_hangs_waits_and_is_answered_when_it_goes_on(
    link: SaverLink, tmp_path: Path
) -> None:
    stop(link)
    assert link.send(commit(tmp_path, 1))  # and it came back
    assert link.send(commit(tmp_path, 2))
    assert link.full_fileno is not None
    go_on(link)
    assert [answer.step for answer in answers(link, 2) if isinstance(answer, messages.SaverFailed)] == [1, 2]
    assert link.full_fileno is None


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    link = SaverLink(tmp_path / "saver.log", max_unsent=1000)
    link.start()
    stop(link)
    assert link.send(commit(tmp_path, 1))
    assert not link.send(commit(tmp_path, 2))
    go_on(link)
    assert len(answers(link, 1)) == 1
    link.close()


def test_what_waits_at_the_end_is_still_said(link: SaverLink, tmp_path: Path) -> None:
    stop(link)
    assert link.send(commit(tmp_path, 1))
    threading.Timer(0.5, go_on, [link]).start()
    link.close()
    assert link.full_fileno is None


def test_all_that_a_saver_was_asked_has_failed_when_it_dies_and_the_next_hears_nothing_of_it(
    link: SaverLink, tmp_path: Path
) -> None:
    stop(link)
    persist = messages.Persist(9, 1, 4, 1, 0, [], str(tmp_path))
    assert link.send(persist)
    assert link.send(commit(tmp_path, 1))
    assert link._process is not None
    link._process.kill()
    received = until(link.receive, "the saver's death")
    died = "the saver process was killed"
    assert received == [
        (saver_link.SaverRequest(False, 4, 9), messages.SaverFailed(9, died)),
        (saver_link.SaverRequest(True, 0, 1), messages.SaverFailed(1, died)),
    ]
    assert (link.full_fileno, link.fileno()) == (None, None)
    assert link.send(messages.Commit(7, 1, 0, 1, str(tmp_path), []))
    assert isinstance(answers(link, 1)[0], messages.SaverFailed)


def test_a_saver_that_starts_during_a_pause_waits_for_its_end(tmp_path: Path) -> None:
    """It would take processors from ranks that restart."""
    link = SaverLink(tmp_path / "saver.log")
    link.pause()
    assert link.send(messages.Persist(9, 1, 4, 1, 0, [], str(tmp_path)))
    wait_until_stopped(link)
    assert link._process is not None
    assert link.paused_pids == (link._process.pid,)
    link.resume()
    assert isinstance(answers(link, 1)[0], messages.SaverFailed)
    link.close()


def test_a_saver_is_not_paused_while_it_is_to_commit(link: SaverLink, tmp_path: Path) -> None:
    """A round that must go back waits for the answer."""
    link.pause()
    wait_until_stopped(link)
    assert link.send(commit(tmp_path, 1))
    link.pause()
    assert len(answers(link, 1)) == 1  # so it was let go on, and not paused again
    link.pause()
    wait_until_stopped(link)


def snapshot(directory: Path, owner: Owner, step: int, size: int = 10) -> str:
    """Of a rank; where it is."""
    pair = ArenaPair(directory, owner, directory / "spill")
    with ThreadPoolExecutor(1) as pool:
        return str(Snapshot(pair, step, flatten({"x": np.full(size, step)}), pool).finish()[0])


def second_of_two(directory: Path, step: int) -> messages.Persist:
    """Of a node that needs the checksums of rank 0, which is on another node."""
    taken = snapshot(directory, Owner(1, 0, 2, 1, 0, "replicated", "run"), step)
    return messages.Persist(step, 1, 0, 2, 1, [taken], str(directory / "shared"))


def persist(directory: Path, step: int, local: Path, size: int = 10) -> messages.Persist:
    """Of a rank that is alone, which takes a snapshot."""
    taken = snapshot(directory, Owner(0, 0, 1, 1, 0, "own", "run"), step, size)
    return messages.Persist(step, 1, 0, 1, 0, [taken], str(directory / "shared"), str(local), "n1")


def test_how_far_a_request_has_come_does_not_end_it(link: SaverLink, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    stop(link)
    assert link.send(persist(tmp_path, 1, tmp_path / "disk"))
    assert link.send(commit(tmp_path, 9))
    assert link.send(persist(tmp_path, 2, tmp_path / "none"))
    go_on(link)
    assert [(request, type(answer)) for request, answer in heard(link, 5)] == [
        (saver_link.SaverRequest(False, 0, 1), messages.Local),
        (saver_link.SaverRequest(False, 0, 1), messages.Persisted),
        (saver_link.SaverRequest(True, 0, 9), messages.SaverFailed),
        (saver_link.SaverRequest(False, 0, 2), messages.LocalFailed),
        (saver_link.SaverRequest(False, 0, 2), messages.Persisted),
    ]


def failure(link: SaverLink) -> str:
    (answer,) = answers(link, 1)
    assert isinstance(answer, messages.SaverFailed), answer
    return answer.error


def test_a_saver_waits_for_rank_0_no_longer_than_its_round_lasts(link: SaverLink, tmp_path: Path) -> None:
    """The node of rank 0 may have heard of the round's end before the order to write."""
    assert link.send(second_of_two(tmp_path, 1))
    until((tmp_path / "shared").is_dir, "the place for rank 0's checksums")
    link.abandon()
    assert failure(link) == "CheckpointError: the round is over"
    stop(link)
    assert link.send(second_of_two(tmp_path, 2))
    link.abandon()
    go_on(link)
    assert failure(link) == "CheckpointError: the round is over"


def test_a_saver_waits_for_rank_0_no_longer_than_that_step_is_wanted(link: SaverLink, tmp_path: Path) -> None:
    assert link.send(second_of_two(tmp_path, 1))
    assert link.send(second_of_two(tmp_path, 2))
    assert failure(link) == "CheckpointError: step 2 was asked for meanwhile"
    link.abandon()
    assert failure(link) == "CheckpointError: the round is over"


def test_the_end_of_a_round_takes_back_no_commit(link: SaverLink, tmp_path: Path) -> None:
    assert link.send(persist(tmp_path, 1, tmp_path / "none"))
    record = answers(link, 2)[1].record  # type: ignore[union-attr]
    stop(link)
    assert link.send(messages.Commit(1, 1, 0, 1, str(tmp_path / "shared"), [record]))
    link.abandon()
    go_on(link)
    assert isinstance(answers(link, 1)[0], messages.Committed)


def test_a_saver_that_dies_while_it_drains_has_failed_and_the_next_one_writes_that_step_again(
    link: SaverLink, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    request = persist(tmp_path, 1, disk, size=5_000_000)
    assert link.send(msgspec.structs.replace(request, bytes_per_s=1e6))  # it would take 40 s
    (local,) = answers(link, 1)
    assert isinstance(local, messages.Local)
    assert link._process is not None
    link._process.kill()
    (said,) = answers(link, 1)
    while link.fileno() is not None:
        link.receive()
    assert said == messages.SaverFailed(1, saver_link.DIED)
    assert link.send(request)
    assert [type(answer) for answer in answers(link, 2)] == [messages.Local, messages.Persisted]
    (copy,) = disk.glob("*/step-*/*")
    assert copy.name == "node-0.h5"
