"""Requests of a save that go side by side: they do, none passes what must come first, and a fault in one of them."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer, Slab
from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import Commit, Committed, Persist, Persisted, SaverFailed
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from tests.support.ckpt.object_looks import data_of, forget, keys_of, url_of
from tests.support.ckpt.object_server import Answer, Asked, Proxy
from tests.support.ckpt.stores import Place

pytestmark = pytest.mark.slow  # the store starts in about ten seconds

FENCE, FORMER, SIZE = r"GET \S*/epoch-fence", r"GET \S*/step-0+2$", r"HEAD \S*/node-0.h5"
FILES = r"GET \S*prefix=\S*data"
LIST, LATEST, OLDER = r"GET \S*prefix=\S*run%2F&delimiter", r"GET \S*/latest", r"GET \S*/step-0+1$"
OWN, BEGIN, LEFT = r"GET \S*/\.staging-step-0+2-", r"PUT \S*/\.staging-step-0+2-", r"GET \S*prefix=\S*run%2F\."
COMMIT = r"PUT \S*/step-0+2$"
REFUSED: Answer = (
    403, {"Content-Type": "application/xml"},
    b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>",
)  # fmt: skip


def text(asked: Asked) -> str:
    return f"{asked.method} {asked.path}"


@pytest.mark.parametrize(
    ("first", "beside"),
    [(LEFT, [BEGIN]), (FENCE, [FORMER, SIZE, FILES, LIST, LATEST, OLDER]), (OWN, [FENCE])],
    ids=["begin", "look", "last look"],
)
def test_requests_that_do_not_need_each_other_go_side_by_side(
    place: Place, proxy: Proxy, first: str, beside: list[str]
) -> None:
    """The first one gets no answer before the others have come."""
    assert isinstance(place.save(1, keep_last=9), Committed)
    begun, waited = dict.fromkeys(beside, False), list[bool]()
    fences: list[str] = []
    all_begun = threading.Event()

    def instead(asked: Asked) -> Answer | None:
        said = text(asked)
        fences.extend(re.findall(FENCE, said))
        if beside == [FENCE] and len(fences) < 2:  # the second one is meant
            return None
        for pattern in beside:
            begun[pattern] |= re.search(pattern, said) is not None
        if all(begun.values()):
            all_begun.set()
        if re.search(first, said) and not waited:
            waited.append(all_begun.wait(30))
        return None

    proxy.instead = instead
    assert isinstance(place.save(2, keep_last=9), Committed)
    assert waited == [True], begun


def test_a_commit_waits_for_both_looks_at_its_fence(place: Place, proxy: Proxy) -> None:
    """What changes the store comes after the answer to the first look, and the step's name after the second."""
    assert isinstance(place.save(1, keep_last=9), Committed)
    order: list[str] = []

    def after(asked: Asked, answer: Answer) -> Answer:
        if re.search(FENCE, text(asked)):
            time.sleep(0.5)  # the others are long done
            order.append("fence")
        return answer

    def instead(asked: Asked) -> Answer | None:
        if re.search(COMMIT, text(asked)):
            order.append("commit")
        elif asked.method in ("PUT", "DELETE") and not re.search("/data/|staging|latest", asked.path):
            order.append(asked.path)
        return None

    proxy.after, proxy.instead = after, instead
    assert isinstance(place.save(2, keep_last=9), Committed)
    assert order == ["fence", "fence", "commit"]


@pytest.mark.parametrize(
    ("wrong", "time_of_it", "is_committed"),
    [
        (LEFT, 1, True),  # what others left can be removed later
        (BEGIN, 1, False), (FENCE, 1, False), (FILES, 1, False), (LIST, 1, False), (LATEST, 1, False),
        (OLDER, 1, False), (FENCE, 2, False), (OWN, 1, False),
        (FORMER, 1, True),  # the condition of the commit stands
        (SIZE, 1, True),  # new credentials are tried: the answer to a HEAD has no code
    ],
)  # fmt: skip
def test_a_fault_in_one_of_the_requests_side_by_side_leaves_nothing_half_done(
    place: Place, proxy: Proxy, server: str, wrong: str, time_of_it: int, is_committed: bool
) -> None:
    """One is refused at once while the others are slow: they end before the save does, and nothing is committed."""
    assert isinstance(place.save(1, keep_last=9), Committed)
    counts, under_way, lock = [0], set[int](), threading.Lock()

    def instead(asked: Asked) -> Answer | None:
        if re.search(wrong, text(asked)):
            with lock:
                counts[0] += 1
                if counts[0] == time_of_it:
                    return REFUSED
        with lock:
            under_way.add(id(asked))
        time.sleep(0.2)
        return None

    def after(asked: Asked, answer: Answer) -> Answer:
        with lock:
            under_way.discard(id(asked))  # the first save may have begun it, which tidies up after its word
        return answer

    proxy.instead, proxy.after = instead, after
    answer = place.save(2, keep_last=9)
    assert is_committed or not under_way, "none is left on its way"
    assert counts[0] >= time_of_it
    proxy.reset()
    if is_committed:
        assert isinstance(answer, Committed)
    else:
        assert isinstance(answer, SaverFailed)
        assert "\n" not in answer.error
        assert place.steps() == [1]
        assert [key for key in keys_of(server, place) if key.startswith("step-")] == ["step-0000000001"]
    assert isinstance(place.save(2 + is_committed, keep_last=1), Committed)
    assert place.steps() == [2 + is_committed]
    assert len(data_of(keys_of(server, place))) == 1, "a later save removes what is left"


def test_a_refusing_fence_is_told_before_what_went_wrong_beside_it(place: Place, proxy: Proxy) -> None:
    """The controller that took over may have removed what this save staged."""
    assert isinstance(place.save(1, epoch=5), Committed)
    place.take_over(5)
    proxy.instead = lambda asked: REFUSED if re.search(f"{LIST}|{SIZE}", text(asked)) else None
    answer = place.save(2, epoch=1)
    assert isinstance(answer, SaverFailed)
    assert "epoch 1 may not commit any more: epoch 5 has taken over" in answer.error


def test_steps_are_listed_side_by_side(place: Place, proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    """The first answer of each kind waits until all steps have been asked for."""
    for step in (1, 2, 3):
        assert isinstance(place.save(step, keep_last=9), Committed)
    kinds = [r"GET \S*/step-0+(\d)$", r"HEAD \S*/data/0+(\d)-\S*/node-0.h5", r"GET \S*/data/0+(\d)-\S*/damaged"]
    begun = {kind: set[str]() for kind in kinds}
    all_begun = {kind: threading.Event() for kind in kinds}
    in_time: list[bool] = []

    def instead(asked: Asked) -> Answer | None:
        for kind in kinds:
            if found := re.search(kind, text(asked)):
                begun[kind].add(found[1])
                if len(begun[kind]) == 3:
                    all_begun[kind].set()
                in_time.append(all_begun[kind].wait(30))
        return None

    forget()
    proxy.seen.clear()
    proxy.instead = instead
    assert resilio_ckpt(["ls", url_of(place), "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["steps"]] == [1, 2, 3]
    assert in_time == [True] * 9
    assert len(proxy.seen) == 3 + 9


def test_a_restore_opens_files_side_by_side(place: Place, proxy: Proxy) -> None:
    """Each of three nodes has written a part of the tensor, and all parts are wanted."""
    url, parts = url_of(place), np.arange(3000, dtype=np.int64).reshape(3, 1000)
    shards = []
    for node in range(3):
        owner = Owner(node, node, 3, 3, 0, "own", "run")
        with closing(ArenaPair(None, owner, place.scratch)) as arenas, ThreadPoolExecutor(1) as pool:
            state = {"x": Slab(parts[node], (3000,), (1000 * node,))}
            path = Snapshot(arenas, 1, flatten(state), pool).finish()[0]
            written = saver.serve(Persist(1, 1, 0, 3, node, [str(path)], str(place.directory)))
        assert isinstance(written, Persisted)
        shards.append(written.record)
    assert isinstance(saver.serve(Commit(1, 1, 0, 3, str(place.directory), shards, Retention(keep_last=1))), Committed)
    begun, both, in_time = set[str](), threading.Event(), list[bool]()

    def instead(asked: Asked) -> Answer | None:
        found = re.search(r"HEAD \S*/node-([12]).h5", text(asked))  # node 0's is read first: this rank's own tensors
        if found:
            begun.add(found[1])
            if len(begun) == 2:
                both.set()
            in_time.append(both.wait(30))
        return None

    proxy.instead = instead
    whole = np.zeros(3000, dtype=np.int64)
    assert Checkpointer(url).restore({"x": Slab(whole, whole.shape, (0,))}) is not None
    assert np.array_equal(whole, parts.reshape(-1))
    assert in_time == [True, True]
