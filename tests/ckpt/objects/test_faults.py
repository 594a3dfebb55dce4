"""An object store that fails, answers late or shows old lists, and writers that die or meet in it.

Ceph honours If-None-Match, If-Match, ranges and uploads in parts, so nothing here needs a stand-in.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.saver.messages import Committed, SaverFailed
from resilio_hpc.ckpt.store import checkpoint_index, mounts, s3_bucket
from resilio_hpc.core.errors import CheckpointError
from tests.support.ckpt.object_looks import BUCKET, data_of, forget, keys_of, uploads_of, url_of
from tests.support.ckpt.object_server import (
    SLOW_DOWN,
    Answer,
    Asked,
    Proxy,
)
from tests.support.ckpt.stores import Place
from tests.support.environments import ROOT

pytestmark = pytest.mark.slow  # the store starts in about ten seconds


def test_a_killed_upload_leaves_no_step_and_the_next_save_removes_what_is_left(
    place: Place, proxy: Proxy, server: str, tmp_path: Path
) -> None:
    """SIGKILL of the training process and of its saver, while a part is on its way."""
    url = url_of(place)
    under_way = threading.Event()

    def instead(asked: Asked) -> Answer | None:
        if "partNumber=2" in asked.path:
            under_way.set()
            time.sleep(60)
        return None

    script = (
        "import sys, time, numpy as np\nfrom resilio_hpc.ckpt import Checkpointer\n"
        "c = Checkpointer(sys.argv[1])\nc.save(1, {'x': np.zeros(100)}).wait()\nprint('one', flush=True)\n"
        "c.save(2, {'x': np.zeros(6 << 20)})\ntime.sleep(600)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, url], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "one\n"
    proxy.instead = instead
    assert under_way.wait(60)
    for pid in _savers_of(child.pid):
        os.kill(pid, signal.SIGKILL)
    child.kill()
    child.wait()
    child.stdout.close()
    proxy.instead = lambda asked: None
    assert len(uploads_of(server, place)) == 1
    checkpointer = Checkpointer(url)
    found = checkpointer.restore({"x": np.zeros(100)})
    assert found is not None
    assert found[0] == 1, "a step without its manifest does not exist"
    checkpointer.save(3, {"x": np.ones(100)}).wait()
    assert uploads_of(server, place) == []
    assert checkpoint_index.committed_steps(place.directory) == [1, 3]
    assert len(data_of(keys_of(server, place))) == 2


def _savers_of(pid: int) -> list[int]:
    """The children of a process."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_files_of_a_living_writer_stay(place: Place, proxy: Proxy, server: str) -> None:
    """Another job saves meanwhile, and removes leftovers, but not these."""
    url = url_of(place)
    under_way, go = threading.Event(), threading.Event()

    def instead(asked: Asked) -> Answer | None:
        if "partNumber=2" in asked.path:
            under_way.set()
            go.wait(60)
        return None

    proxy.instead = instead
    slow = Checkpointer(url).save(5, {"x": np.zeros(6 << 20)})
    assert under_way.wait(60)
    script = (
        "import sys, numpy as np\nfrom resilio_hpc.ckpt import Checkpointer\n"
        "Checkpointer(sys.argv[1]).save(6, {'x': np.zeros(100)}).wait()\n"
    )
    subprocess.run([sys.executable, "-c", script, url], cwd=ROOT, check=True, timeout=120)
    assert len(uploads_of(server, place)) == 1
    go.set()
    slow.wait()
    assert sorted(checkpoint_index.committed_steps(place.directory)) == [5, 6]


def test_an_overloaded_store_is_tried_again(place: Place, proxy: Proxy, capfd: pytest.CaptureFixture[str]) -> None:
    until = time.monotonic() + 6.0  # a minute, made shorter: the pauses between tries grow to ten seconds
    proxy.instead = lambda asked: SLOW_DOWN if time.monotonic() < until else None
    assert isinstance(place.save(1), Committed)
    assert place.steps() == [1]
    assert re.search(r"s3://training: it answers 503 SlowDown; trying again for \d+ s", capfd.readouterr().err)


def test_a_store_that_stays_away_fails_the_save_clearly_and_loses_nothing(
    place: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert isinstance(place.save(1, keep_last=9), Committed)
    monkeypatch.setenv(s3_bucket.DEADLINE_VARIABLE, "2")
    forget()
    proxy.instead = lambda asked: SLOW_DOWN if asked.method == "PUT" else None
    answer = place.save(2, keep_last=9)
    assert isinstance(answer, SaverFailed)
    assert "the object store does not serve requests (it answers 503 SlowDown), 2 s long" in answer.error
    proxy.instead = lambda asked: None
    assert place.steps() == [1]
    assert isinstance(place.save(2, keep_last=9), Committed), "memory has the step: it is written now"
    assert place.steps() == [1, 2]


def test_every_step_of_a_save_may_fail(place: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store goes away at each of its requests in turn. A committed step stays, and what is there is whole."""
    monkeypatch.setenv(s3_bucket.DEADLINE_VARIABLE, "1")
    monkeypatch.setattr(s3_bucket, "_deadline_s", lambda: 0.0)
    forget()
    assert isinstance(place.save(1, keep_last=1), Committed)
    for number in range(0, 200, 3):
        count = iter(range(1 << 30))
        proxy.instead = lambda asked, n=number, c=count: SLOW_DOWN if next(c) >= n else None  # type: ignore[misc]
        answer = place.save(2, keep_last=9)
        proxy.instead = lambda asked: None
        steps = place.steps()
        assert steps in ([1], [1, 2])
        assert steps == [1, 2] or not isinstance(answer, Committed)
        if isinstance(answer, Committed):
            break
    else:
        raise AssertionError("it never succeeded")
    assert place.restored() == 2


def test_an_old_list_hides_no_step(place: Place, proxy: Proxy) -> None:
    """The list of the directory is the one of before the last two changes."""
    place.take_over(1)
    assert isinstance(place.save(1, keep_last=9), Committed)
    old: dict[str, Answer] = {}

    def stale(asked: Asked, answer: Answer) -> Answer:
        if "list-type=2" not in asked.path or answer[0] != 200:
            return answer
        return old.setdefault(asked.path.partition("?")[2], answer)

    checkpoint_index.committed_steps(place.directory)
    proxy.after = stale
    checkpoint_index.committed_steps(place.directory)  # this list is seen from now on
    assert isinstance(place.save(2, keep_last=9), Committed)
    assert place.steps() == [1, 2]
    assert place.restored() == 2
    assert isinstance(place.save(3, keep_last=1), Committed)
    assert place.steps()[-1] == 3
    assert place.restored() == 3
    proxy.after = lambda asked, answer: answer
    place.save(4, keep_last=1)
    assert place.steps() == [4], "later lists show the steps that were to be removed"


def test_of_two_writers_of_a_step_the_second_is_refused(place: Place, proxy: Proxy) -> None:
    """Neither sees the other before its commit."""
    store, final = place.store, place.directory / "step-0000000001"
    stagings = [place.directory / f".staging-step-0000000001-e{epoch}-r0" for epoch in (1, 2)]
    for staging in stagings:
        store.make_new_directory(staging)
        store.write(staging / "manifest.json", staging.name.encode())
    both = threading.Barrier(2)

    def instead(asked: Asked) -> Answer | None:
        if asked.method == "PUT" and asked.path.endswith("/step-0000000001"):
            both.wait(30)
        return None

    proxy.instead = instead

    def commit(staging: Path) -> str:
        try:
            store.put_in_place(staging, final, lambda former: None)
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(commit, stagings))
    assert sorted(map(bool, said)) == [False, True]
    assert "another writer committed this step meanwhile; its step stays" in "".join(said)
    proxy.instead = lambda asked: None
    assert store.read(final / "manifest.json") == stagings[said.index("")].name.encode()


def test_a_commit_whose_answer_is_lost_is_no_other_writers(place: Place, proxy: Proxy) -> None:
    lost = []

    def after(asked: Asked, answer: Answer) -> Answer:
        if asked.method == "PUT" and asked.path.endswith("/step-0000000001") and not lost:
            lost.append(answer[0])
            return SLOW_DOWN
        return answer

    proxy.after = after
    assert isinstance(place.save(1), Committed)
    assert lost == [200]
    assert place.steps() == [1]


def test_a_save_that_was_removed_as_dead_is_not_committed(place: Place, proxy: Proxy) -> None:
    """Its writer was only slow. The process that removes it, and the writer, come together at the commit."""
    store, final = place.store, place.directory / "step-0000000001"
    staging = place.directory / ".staging-step-0000000001-e1-r0"
    store.make_new_directory(staging)
    store.write(staging / "manifest.json", b"m")
    other = mounts._object_store.__wrapped__(Path(f"/s3:/{BUCKET}").parent, BUCKET)
    removed: list[Path] = []

    def instead(asked: Asked) -> Answer | None:
        if asked.method == "PUT" and asked.path.endswith("/step-0000000001") and not removed:
            removed.append(Path())
            removed.append(other.move_away(staging, "removed"))
        return None

    proxy.instead = instead
    with pytest.raises(CheckpointError, match="another process took this save for dead, and removed it"):
        store.put_in_place(staging, final, lambda former: None)
    proxy.instead = lambda asked: None
    assert not store.exists(final)
    store.remove(removed[1])
    assert store.names(place.directory) == []
