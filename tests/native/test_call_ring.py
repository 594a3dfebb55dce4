"""The call ring, written by the C code that the interposers share, read from outside: whole whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from resilio_hpc.core.wire import MAX_BYTES_HEARD
from resilio_hpc.diagnose.hangs.call_ring import CAPACITY, GROUPS, SIZE, CallRing
from resilio_hpc.diagnose.hangs.rank_sight import MAX_CALLS, MAX_GROUPS, GpuSight, RankSight
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.rank_look import process_facts
from resilio_hpc.native import intercept
from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S, until

SOURCE = ROOT / "tests" / "support" / "native" / "ring_writer.c"


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that writes rings."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("ring") / "writer"
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-pthread")
    subprocess.run([compiler, *flags, "-o", made, SOURCE], check=True, timeout=PATIENCE_S)
    return made


def write(writer: Path, ring: Path, *words: str) -> int:
    environment = {**os.environ, "RESILIO_CALLS": str(ring)}
    return subprocess.run([writer, *words], env=environment, timeout=PATIENCE_S, check=False).returncode


@contextlib.contextmanager
def writing(writer: Path, ring: Path, still_open: int) -> Iterator[None]:
    """A process that writes calls, until it is killed."""
    argv, environment = [writer, "forever", str(still_open)], {**os.environ, "RESILIO_CALLS": str(ring)}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


def test_calls_of_several_threads_are_counted_by_group(writer: Path, tmp_path: Path) -> None:
    assert write(writer, tmp_path / "ring", "threads", "300") == 0
    ring = CallRing(tmp_path / "ring")
    groups, calls = ring.look()
    assert ring.counts == (1200, 1200)
    assert ring.groups(8) == groups
    assert ring.groups(2) == groups[-2:]
    assert sorted((group.id, group.family, group.rank, group.size, group.entered) for group in groups) == [
        (number, "test", 1, 4, 300) for number in (1, 2, 3, 4)
    ]
    assert sorted((groups[call.group].id, call.op, call.sequence, call.shape, call.completed) for call in calls) == [
        (number, "all_reduce", 300, "7 float32", True) for number in (1, 2, 3, 4)
    ]
    assert {(call.blocks, call.awaited) for call in calls} == {(False, True)}  # beside the program's main thread
    assert (tmp_path / "ring").stat().st_mode & 0o777 == 0o600


def test_what_waits_is_found_after_the_ring_has_turned(writer: Path, tmp_path: Path) -> None:
    with writing(writer, tmp_path / "ring", 3):
        ring = CallRing(tmp_path / "ring")
        until(lambda: ring.counts[0] > 3 * CAPACITY, "the ring turns")
    (group,), calls = ring.look()
    waiting = [call for call in calls if not call.completed]
    assert len(waiting) in (2, 3, 4)  # it was killed between any two stores
    assert [call.sequence for call in waiting] == sorted(call.sequence for call in waiting)
    assert group.entered - waiting[-1].sequence in (0, 1)
    assert {(call.op, call.peer, call.blocks) for call in calls} == {("broadcast", 2, True)}
    assert all(call.shape == f"{call.sequence} int64" for call in calls)


def test_a_ring_is_whole_whenever_its_writer_is_killed_and_while_it_writes(writer: Path, tmp_path: Path) -> None:
    draw = Random(1)
    for turn in range(20):
        path = tmp_path / f"ring{turn}"
        with writing(writer, path, 5):
            ring = CallRing(path)
            for _ in range(5):  # beside a writer
                _, calls = ring.look()
                assert all(call.shape == f"{call.sequence} int64" for call in calls)
            time.sleep(draw.uniform(0.0, 0.01))
        _, calls = ring.look()
        assert all(call.shape == f"{call.sequence} int64" for call in calls)
        ring.close()


def test_a_child_of_a_rank_does_not_write_into_its_ring(writer: Path, tmp_path: Path) -> None:
    assert write(writer, tmp_path / "ring", "fork", "1") == 0
    assert CallRing(tmp_path / "ring").counts == (1, 1)


def test_of_more_groups_than_fit_the_calls_are_counted(writer: Path, tmp_path: Path) -> None:
    assert write(writer, tmp_path / "ring", "groups", str(GROUPS + 50)) == 0
    ring = CallRing(tmp_path / "ring")
    groups, calls = ring.look()
    assert (ring.counts, ring.unlisted) == ((GROUPS, 0), 50)
    assert len(groups) == MAX_GROUPS
    assert len(calls) <= MAX_GROUPS + MAX_CALLS


def test_an_object_that_was_freed_unseen_is_not_taken_for_the_next_one_at_its_address(
    writer: Path, tmp_path: Path
) -> None:
    assert write(writer, tmp_path / "ring", "dropped") == 0
    _, calls = CallRing(tmp_path / "ring").look()
    assert [(call.op, call.awaited, call.completed) for call in calls] == [
        ("send", False, False), ("recv", True, True),
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["", "no such folder/ring", "link"])
def test_without_a_place_nothing_is_noted(writer: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    assert write(writer, tmp_path / where if where else Path(), "groups", "3") == 0
    assert not (tmp_path / "other").exists()


def test_any_bytes_are_read_without_harm(writer: Path, tmp_path: Path) -> None:
    assert write(writer, tmp_path / "ring", "threads", "100") == 0
    good = (tmp_path / "ring").read_bytes()
    draw = Random(3)
    hostile = tmp_path / "hostile"
    for turn in range(300):
        damaged = bytearray(good)
        first = 0 if turn % 3 == 0 else 32  # else the header's shape stays
        for _ in range(draw.choice((1, 10, 1000))):
            at = draw.randrange(first, len(damaged) - 8)
            damaged[at : at + 8] = draw.choice((draw.randbytes(8), b"\xff" * 8, b"\0" * 8))
        hostile.write_bytes(damaged[: draw.choice((SIZE, SIZE, draw.randrange(SIZE)))])
        try:
            ring = CallRing(hostile)
        except OSError:
            continue
        groups, calls = ring.look()
        sight = RankSight(0, gpu=ring.gpu())
        assert msgspec.json.decode(msgspec.json.encode(sight), type=RankSight) == sight  # as in a message
        assert len(groups) <= MAX_GROUPS
        assert len(calls) <= MAX_GROUPS + MAX_CALLS
        assert all(0 <= call.group < len(groups) for call in calls)
        ring.close()


def test_a_ring_that_is_cut_short_meanwhile_does_not_end_its_reader(writer: Path, tmp_path: Path) -> None:
    assert write(writer, tmp_path / "ring", "threads", "100") == 0
    ring = CallRing(tmp_path / "ring")
    os.truncate(tmp_path / "ring", 100)
    ring.look()
    os.truncate(tmp_path / "ring", 0)
    assert ring.gpu() is None
    assert (ring.counts, ring.unlisted) == ((0, 0), 0)
    assert ring.look() == ((), ())


def test_what_the_kernel_knows_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            until(lambda: process_facts(process.pid)[0] == "S", "it sleeps")
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: process_facts(process.pid)[0] == "T", "it is stopped")
        finally:
            process.kill()
    assert process_facts(process.pid) == ("", "", 0.0)
    assert process_facts(os.getpid())[2] > 0


def test_the_looks_at_all_ranks_of_a_node_fit_into_one_message(writer: Path, tmp_path: Path) -> None:
    assert write(writer, tmp_path / "ring", "groups", str(GROUPS)) == 0
    ring = CallRing(tmp_path / "ring")
    most = 1 << 50
    gpu = GpuSight("freed memory", 1e9 / 3, most, most, most, most, 1e300 / 3, most, most, most, 1e9 / 3)
    for ranks in (1, 8, 64, 256):
        groups, calls = ring.look(ranks)
        sights = tuple(
            RankSight(rank, 1 << 50, "S", "x" * 64, 1e9, 1 << 50, 1 << 50, groups, calls, "p" * 300, gpu=gpu)
            for rank in range(ranks)
        )
        message = m.RanksSeen("n" * 60, 1, 1, 1, sights)
        data = m.to_controller.encode(message)
        assert len(data) < MAX_BYTES_HEARD / 2
        assert m.to_controller.decode(data) == message


def test_a_process_that_enters_another_round_forgets_the_groups_of_the_one_before(tmp_path: Path) -> None:
    library = intercept.library("gloo")
    if library is None:
        pytest.skip("needs the C extensions")
    program = """
import os, sys
import torch
import torch.distributed as dist
from resilio_hpc.native import intercept
for number in range(2):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{number}", rank=0, world_size=1)
    for _ in range(3 - number):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    after = f"{sys.argv[1]}/ring{number}"
    if number == 0:
        intercept.begin_round(os.environ["RESILIO_CALLS"], after)
print(os.getpid())
"""
    ring = tmp_path / "ring"
    environment = {**os.environ, "LD_PRELOAD": library, "RESILIO_CALLS": str(ring)}
    argv = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = CallRing(tmp_path / "ring0")
    (group,) = found.groups(9)
    assert group.entered == 2, "of the three before, none counts"
    assert found.counts == (5, 5), "all calls go on to be counted"
    assert found.process == int(done.stdout)
    found.close()
