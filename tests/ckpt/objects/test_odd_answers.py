"""What a store, or a proxy in front of it, may answer beside yes, no and later; and clocks, credentials, buckets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.saver.messages import Committed, SaverFailed
from resilio_hpc.ckpt.store import checkpoint_index, mounts, s3_bucket
from resilio_hpc.core.errors import CheckpointError
from tests.support.ckpt.object_looks import BUCKET, data_of, forget, keys_of, uploads_of, url_of
from tests.support.ckpt.object_server import ACCESS, SECRET, SLOW_DOWN, Answer, Asked, Proxy, client_of
from tests.support.ckpt.stores import Place

pytestmark = pytest.mark.slow  # the store starts in about ten seconds

STEP = re.compile(r"/step-0000000001$")


def error(status: int, code: str) -> Answer:
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>a test</Message></Error>"
    return status, {"Content-Type": "application/xml"}, body.encode()


def once(wanted: Callable[[Asked], bool], answer: Answer, seen: list[str]) -> Callable[[Asked], Answer | None]:
    """Give this answer, to the first request that is wanted."""

    def instead(asked: Asked) -> Answer | None:
        if seen or not wanted(asked):
            return None
        seen.append(asked.path)
        return answer

    return instead


def is_completion(asked: Asked) -> bool:
    return asked.method == "POST" and "uploadId=" in asked.path


@pytest.mark.parametrize("body", [error(200, "InternalError")[2], b""], ids=["an error", "nothing"])
def test_an_upload_whose_end_is_answered_with_200_and_an_error_is_ended_again(
    place: Place, proxy: Proxy, server: str, body: bytes
) -> None:
    seen: list[str] = []
    proxy.instead = once(is_completion, (200, {"Content-Type": "application/xml"}, body), seen)
    whole = np.arange(5 << 20, dtype=np.int64)
    Checkpointer(url_of(place), local=str(place.scratch)).save(1, {"x": whole}).wait()
    assert seen
    assert uploads_of(server, place) == []
    found = Checkpointer(url_of(place)).restore()
    assert found is not None
    assert np.array_equal(found[1]["x"], whole)


def test_an_upload_that_ended_though_its_answer_was_an_error_is_whole(place: Place, proxy: Proxy) -> None:
    seen: list[str] = []

    def after(asked: Asked, answer: Answer) -> Answer:
        if is_completion(asked) and not seen:
            seen.append(asked.path)
            return error(200, "InternalError")
        return answer

    proxy.after = after
    whole = np.arange(5 << 20, dtype=np.int64)
    Checkpointer(url_of(place), local=str(place.scratch)).save(1, {"x": whole}).wait()
    assert seen
    found = Checkpointer(url_of(place)).restore()
    assert found is not None
    assert np.array_equal(found[1]["x"], whole)


def test_a_commit_that_a_proxy_sent_twice_is_no_other_writers(place: Place, proxy: Proxy) -> None:
    """The refusal of the second one is what comes back, at the first try."""
    refused = []

    def after(asked: Asked, answer: Answer) -> Answer:
        if asked.method == "PUT" and STEP.search(asked.path) and not refused:
            refused.append(answer[0])
            return error(412, "PreconditionFailed")
        return answer

    proxy.after = after
    assert isinstance(place.save(1), Committed)
    assert refused == [200]
    assert place.steps() == [1]


def test_a_store_with_conditions_is_not_warned_of_when_it_was_busy(
    place: Place, proxy: Proxy, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second write of a name, which tells, is repeated: its refusal is no success of the first try."""
    names = itertools.count()
    proxy.instead = lambda asked: (
        SLOW_DOWN if asked.method == "PUT" and ".staging-" in asked.path and next(names) == 1 else None
    )
    assert isinstance(place.save(1), Committed)
    assert "ignores If-None-Match" not in capfd.readouterr().err


def test_a_write_that_is_answered_with_404_has_failed(place: Place, proxy: Proxy) -> None:
    proxy.instead = lambda asked: (
        error(404, "NoSuchKey") if asked.method == "PUT" and asked.path.endswith(".h5") else None
    )
    assert isinstance(place.save(1), SaverFailed)


def test_a_bucket_that_vanishes_during_a_save_is_told_in_one_line(place: Place, proxy: Proxy) -> None:
    assert isinstance(place.save(1, keep_last=9), Committed)
    for number in itertools.count():
        count = itertools.count()
        proxy.instead = lambda asked, n=number, c=count: (  # type: ignore[misc]
            (error(404, "NoSuchBucket") if asked.method != "HEAD" else (404, {}, b"")) if next(c) >= n else None
        )
        answer = place.save(2, keep_last=9)
        with pytest.raises(OSError, match="there is no such bucket"):
            checkpoint_index.committed_steps(place.directory)
        proxy.instead = lambda asked: None
        if isinstance(answer, Committed):
            break
        assert isinstance(answer, SaverFailed)
        assert "no such bucket" in answer.error or "missing or has another size" in answer.error
        assert "\n" not in answer.error
        assert place.steps() in ([1], [1, 2])
    assert place.restored() == 2


def test_credentials_that_expire_are_read_again(
    place: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another program writes new ones to the file, as those for single sign-on do."""
    file, new = tmp_path / "credentials", tmp_path / "new"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    file.write_text("[default]\naws_access_key_id=old\naws_secret_access_key=old\n")
    forget()
    written: list[int] = []

    def instead(asked: Asked) -> Answer | None:
        if "Credential=old/" not in asked.headers["Authorization"]:
            return None
        if not written:
            written.append(new.write_text(f"[default]\naws_access_key_id={ACCESS}\naws_secret_access_key={SECRET}\n"))
            new.replace(file)
        return error(400, "ExpiredToken")

    proxy.instead = instead
    assert isinstance(place.save(1), Committed)
    assert place.steps() == [1]


def test_credentials_may_expire_at_each_request_of_a_save(
    place: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A request shows by the name of its program which client it is from."""
    file = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    for begins in range(0, 30, 3):
        count = itertools.count()
        file.write_text(f"[default]\nsdk_ua_app_id=old{begins}\n")
        forget()

        def instead(asked: Asked, name: str = f"app/old{begins}", n: int = begins) -> Answer | None:
            if name not in asked.headers["User-Agent"] or next(count) < n:  # noqa: B023 - it is of this turn
                return None
            file.write_text("[default]\nsdk_ua_app_id=new\n")
            return error(400, "ExpiredToken")

        proxy.instead = instead
        assert isinstance(place.save(1 + begins), Committed)
    proxy.instead = lambda asked: error(400, "ExpiredToken")
    answer = place.save(100)
    assert isinstance(answer, SaverFailed)
    assert "it refuses these credentials (ExpiredToken)" in answer.error


def test_a_wrong_clock_is_told_at_once(place: Place, proxy: Proxy) -> None:
    proxy.instead = lambda asked: error(403, "RequestTimeTooSkewed")
    answer = place.save(1)
    assert isinstance(answer, SaverFailed)
    assert "this machine's clock differs too much from the store's (RequestTimeTooSkewed): set it" in answer.error
    assert len(proxy.seen) < 5, "it is not asked again"


@pytest.mark.parametrize(
    "answer",
    [
        error(400, "BadDigest"), error(400, "IncompleteBody"), error(400, "XAmzContentSHA256Mismatch"),
        error(429, "TooManyRequests"), error(503, "SlowDown"), error(500, "InternalError"),
        error(409, "OperationAborted"), error(409, "ConditionalRequestConflict"),
        (200, {"Content-Type": "text/html"}, b"<html><body>please\nlog in</body>"), (502, {}, b""),
    ],
    ids=lambda answer: f"{answer[0]} {re.sub('<[^>]*>', ' ', answer[2].decode())[:30].strip()}",
)  # fmt: skip
def test_an_answer_that_another_try_may_mend(place: Place, proxy: Proxy, answer: Answer) -> None:
    """Each kind of request gets it once: a write is torn on its way, a gateway has its own page."""
    seen: set[tuple[str, str]] = set()

    def instead(asked: Asked) -> Answer | None:
        kind = asked.method, re.sub(r"\d|[0-9a-f]{16}", "", asked.path.partition("?")[0])
        if kind in seen or asked.method in ("DELETE", "HEAD") or (answer[0] == 200 and asked.method == "PUT"):
            return None
        if answer[0] == 200 and "list-type" not in asked.path:
            return None
        seen.add(kind)
        return answer

    proxy.instead = instead
    assert isinstance(place.save(1), Committed)
    assert seen
    assert place.restored() == 1


def test_a_page_that_is_no_answer_of_a_store_is_told_in_one_line(
    place: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(s3_bucket.DEADLINE_VARIABLE, "1")
    forget()
    proxy.instead = lambda asked: (200, {"Content-Type": "text/html"}, b"<html><body>please\nlog in</body>")
    with pytest.raises(OSError, match="does not serve requests") as told:
        checkpoint_index.committed_steps(place.directory)
    assert "\n" not in str(told.value)


def test_a_connection_that_was_closed_while_idle_is_opened_again(place: Place, proxy: Proxy) -> None:
    """A proxy closes it just when the next request is sent: no answer comes, also to a commit."""
    seen: set[str] = set()

    def instead(asked: Asked) -> Answer | None:
        if asked.path not in seen:
            seen.add(asked.path)
            raise ConnectionResetError
        return None

    proxy.instead = instead
    assert isinstance(place.save(1), Committed)
    proxy.instead = lambda asked: None
    assert place.steps() == [1]


def test_a_store_that_gives_all_where_a_range_was_asked_for(place: Place, proxy: Proxy, server: str) -> None:
    place.save(1)
    given: list[str] = []

    def after(asked: Asked, answer: Answer) -> Answer:
        if answer[0] != 206:
            return answer
        given.append(asked.path)
        found = client_of(server).get_object(Bucket=BUCKET, Key=asked.path.removeprefix(f"/{BUCKET}/"))
        return (
            200,
            {name: of for name, of in answer[1].items() if name.lower() != "content-range"},
            found["Body"].read(),
        )

    proxy.after = after
    assert place.restored() == 1
    assert place.steps() == [1]
    assert any(path.endswith(".h5") for path in given)


def test_a_writer_that_was_stopped_until_its_save_was_gone_commits_nothing(place: Place, proxy: Proxy) -> None:
    """It is stopped in its commit. Another process takes it for dead, and removes all of its save, the mark at last."""
    store, final = place.store, place.directory / "step-0000000001"
    staging = place.directory / ".staging-step-0000000001-e1-r0"
    store.make_new_directory(staging)
    with store.new_file(staging / "node-0.h5") as file:
        file.write_small(memoryview(b"content"), 0)
    store.write(staging / "manifest.json", b"m")
    other = mounts._object_store.__wrapped__(Path(f"/s3:/{BUCKET}").parent, BUCKET)
    removed: list[str] = []

    def instead(asked: Asked) -> Answer | None:
        if asked.method == "PUT" and STEP.search(asked.path) and not removed:
            removed.append(asked.path)
            other.remove(other.move_away(staging, "removed"), ignore_errors=False)
        return None

    proxy.instead = instead
    with pytest.raises(CheckpointError, match="another process took this save for dead, and removed it"):
        store.put_in_place(staging, final, lambda former: None)
    assert removed
    proxy.instead = lambda asked: None
    assert not store.exists(final)
    for name in store.names(place.directory):
        store.remove(place.directory / name)
    assert store.names(place.directory) == []


def test_a_commit_that_was_seen_by_what_took_its_writer_for_dead_stays(place: Place, proxy: Proxy, server: str) -> None:
    """The name of the save is gone when its writer looks for it, and its files are there."""
    other = mounts._object_store.__wrapped__(Path(f"/s3:/{BUCKET}").parent, BUCKET)
    removed: list[str] = []

    def after(asked: Asked, answer: Answer) -> Answer:
        if asked.method == "PUT" and STEP.search(asked.path) and not removed:
            removed.append(asked.path)
            staging = place.directory / ".staging-step-0000000001-e1-r0"
            other.remove(other.move_away(staging, "removed"), ignore_errors=False)
        return answer

    proxy.after = after
    assert isinstance(place.save(1), Committed)
    assert removed
    assert place.steps() == [1]
    assert len(data_of(keys_of(server, place))) == 1
