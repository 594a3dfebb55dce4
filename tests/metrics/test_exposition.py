"""A real endpoint, scraped over HTTP, and the textfile: what Prometheus reads, and who may."""

from __future__ import annotations

import http.client
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from resilio_hpc.metrics import textfile
from resilio_hpc.metrics.exposition import MOST_CALLERS, Endpoint, exposition
from resilio_hpc.metrics.schema import METRICS
from resilio_hpc.metrics.sheet import Sheet
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


def sheet() -> Sheet:
    found = Sheet()
    found.put("host_load1", 1.5)
    found.put("rank_op_calls_total", 12, 3, "all_reduce")
    found.put("network_sent_bytes_total", 7, 'eth0"\n# evil 1')
    return found


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint("127.0.0.1", 0, "")
    found.text = exposition(sheet(), "abc", "n1")
    yield found
    found.close()


@pytest.fixture
def guarded() -> Iterator[Endpoint]:
    found = Endpoint("127.0.0.1", 0, "secret")
    found.text = b"# held back\n"
    yield found
    found.close()


def scrape(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_prometheus_reads_what_was_sampled(endpoint: Endpoint) -> None:
    status, text = scrape(endpoint.url)
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {"resilio_host_load1", "resilio_rank_op_calls", "resilio_network_sent_bytes"}
    (calls,) = families["resilio_rank_op_calls"].samples
    assert (calls.name, calls.value) == ("resilio_rank_op_calls_total", 12)
    assert calls.labels == {"run": "abc", "node": "n1", "rank": "3", "op": "all_reduce"}
    assert families["resilio_rank_op_calls"].type == "counter"
    (sent,) = families["resilio_network_sent_bytes"].samples
    assert sent.labels["device"] == "eth0__# evil 1"


def test_all_metrics_of_the_schema_can_be_read() -> None:
    everything = Sheet()
    for name, metric in METRICS.items():
        everything.put(name, 1, *(["x"] * len(metric.labels)))
    text = exposition(everything, "r", "n").decode()
    families = list(text_string_to_metric_families(text))
    assert len(families) == len(METRICS)
    assert {(f.type, bool(f.documentation)) for f in families} == {("counter", True), ("gauge", True)}


def test_only_get_and_only_metrics(endpoint: Endpoint) -> None:
    assert scrape(endpoint.url.replace("/metrics", "/"))[0] == 404
    assert scrape(endpoint.url.replace("/metrics", "/../../etc/passwd"))[0] == 404
    request = urllib.request.Request(endpoint.url, data=b"x" * 100, method="POST")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request, timeout=PATIENCE_S)


@pytest.mark.parametrize("given", ["", "Bearer wrong", "secret", "Bearer secret2", "bearer secret", "Bearer s\xe9cret"])
def test_without_the_token_nothing_is_told(guarded: Endpoint, given: str) -> None:
    headers = {"Authorization": given} if given else {}
    status, text = scrape(guarded.url, **headers)
    assert (status, text) == (401, "")


def test_with_the_token_it_is_told(guarded: Endpoint) -> None:
    assert scrape(guarded.url, Authorization="Bearer secret") == (200, "# held back\n")


def test_callers_that_say_nothing_leave_room_again(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilio_hpc.metrics.exposition._Handler.timeout", 0.5)
    port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_CALLERS + 4)]

    def answered() -> bool:
        try:
            return scrape(endpoint.url)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    until(answered, "an answer beside callers that say nothing")
    for one in silent:
        one.close()


def test_a_request_that_never_ends_is_refused(endpoint: Endpoint) -> None:
    port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.settimeout(PATIENCE_S)
        caller.sendall(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
        assert b" 414 " in caller.recv(4096)
    assert scrape(endpoint.url)[0] == 200


def test_a_port_in_use_is_an_error(endpoint: Endpoint) -> None:
    port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(OSError, match="in use"):
        Endpoint("127.0.0.1", port, "")


def test_the_textfile_is_whole_readable_by_others_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = textfile.path_of(str(tmp_path), "abc/../x", "n1 \x1b")
    before = os.umask(0o077)
    try:
        textfile.write(path, b"one\n")
        textfile.write(path, b"two\n")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"two\n"
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_stale_files_of_this_user_are_removed_and_no_others(tmp_path: Path) -> None:
    now = time.time()
    stale, fresh, other = (tmp_path / name for name in ("resilio-a-n1.prom", "resilio-b-n1.prom", "node.prom"))
    for path in (stale, fresh, other):
        path.write_text("x 1\n")
    for path in (stale, other):
        os.utime(path, (now - 3600, now - 3600))
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "resilio-link.prom").symlink_to(victim)
    textfile.remove_stale(str(tmp_path), now)
    assert {path.name for path in tmp_path.iterdir()} >= {"resilio-b-n1.prom", "node.prom", "victim"}
    assert not stale.exists()
    assert victim.read_text() == "kept"
    textfile.remove_stale(str(tmp_path / "missing"), now)


def test_an_address_that_is_none_is_an_error() -> None:
    with pytest.raises(OSError, match=r"."):
        Endpoint("256.0.0.1.invalid", 0, "")
