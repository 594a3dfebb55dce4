"""``resilio view --web``: one page, for the owner of the token, in time, and live in a real headless Chromium."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.cli.web_view import HOST, PageServer, _made
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.ledger import Ledger
from tests.support.report.chromium import Chromium, chromium
from tests.support.report.hostile_run import write_hostile_run
from tests.support.waiting import until


@contextmanager
def serving(server: PageServer) -> Iterator[PageServer]:
    thread = threading.Thread(target=partial(server.serve_forever, 0.02))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(server: PageServer, path: str, method: str = "GET", host: str = "") -> tuple[int, bytes, dict[str, str]]:
    link = http.client.HTTPConnection(HOST, server.server_address[1], timeout=60)
    try:
        link.request(method, path, headers={"Host": host} if host else {})
        answer = link.getresponse()
        return answer.status, answer.read(), dict(answer.headers)
    finally:
        link.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    with serving(PageServer(lambda: b"<p>a page")) as one:
        yield one


def test_the_page_is_for_the_owner_of_the_token(server: PageServer) -> None:
    code, content, headers = asked(server, f"/{server.token}/")
    assert (code, content) == (200, b"<p>a page")
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    assert asked(server, f"/{server.token}/", "HEAD")[:2] == (200, b"")


@pytest.mark.parametrize("path", ["/", "/{token}", "/{token}x/", "/x/{token}/", "/{token}/../", "/%2e%2e/etc/passwd"])
def test_everything_else_is_nothing(server: PageServer, path: str) -> None:
    assert asked(server, path.format(token=server.token))[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_it_is_read_only(server: PageServer, method: str) -> None:
    assert asked(server, f"/{server.token}/", method)[0] == 501


def test_another_sites_name_for_this_machine_is_refused(server: PageServer) -> None:
    assert asked(server, f"/{server.token}/", host=f"evil.example:{server.server_address[1]}")[0] == 404
    assert asked(server, f"/{server.token}/", host=f"localhost:{server.server_address[1]}")[0] == 200


def test_a_slow_request_is_cut_and_the_others_are_answered() -> None:
    with (
        serving(PageServer(lambda: b"page", whole_s=0.5)) as server,
        socket.create_connection((HOST, server.server_address[1])) as slow,
    ):
        slow.sendall(b"GET /")
        assert asked(server, f"/{server.token}/")[0] == 200
        slow.settimeout(60)
        dripping = threading.Event()
        threading.Thread(target=lambda: [_drip(slow) for _ in iter(lambda: dripping.wait(0.1), True)]).start()
        try:
            assert slow.recv(1) == b""  # though a byte comes every tenth of a second
        except ConnectionResetError:
            pass
        finally:
            dripping.set()


def _drip(slow: socket.socket) -> None:
    try:
        slow.sendall(b"x")
    except OSError:
        pass


def test_a_directory_that_hangs_is_said_and_read_by_one_thread() -> None:
    hangs, calls = threading.Event(), []

    def make() -> bytes:
        calls.append(1)
        hangs.wait()
        return b"at last"

    with serving(PageServer(make, make_s=0.1)) as server:
        for _ in range(3):
            code, content, _ = asked(server, f"/{server.token}/")
            assert code == 503 and b"does not answer" in content
        hangs.set()
        until(lambda: asked(server, f"/{server.token}/")[1] == b"at last", "the page")
        assert len(calls) == 1


def test_a_run_that_is_removed_is_said() -> None:
    def make() -> bytes:
        raise UsageError("run does not exist")

    with serving(PageServer(make)) as server:
        assert asked(server, f"/{server.token}/")[:2] == (503, b"run does not exist\n")


def test_a_young_page_is_sent_again() -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"page"

    with serving(PageServer(make, fresh_s=1000.0)) as server:
        assert [asked(server, f"/{server.token}/")[0] for _ in range(5)] == [200] * 5
    assert len(made) == 1


@pytest.mark.parametrize("argv", ["--port 5", "--web --port 70000", "--web"])
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: str) -> None:
    assert main.main(["view", str(tmp_path), *argv.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_port_that_is_taken_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], server: PageServer) -> None:
    run = write_hostile_run(tmp_path / "run")
    assert main.main(["view", str(run), "--web", "--port", str(server.server_address[1])]) == 2
    assert "give another one, or none" in capsys.readouterr().err


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as one:
        yield one


def text_of(browser: Chromium) -> str:
    return str(browser.of("document.body.innerText"))


def started(path: Path) -> Ledger:
    (path / "ledger").mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"version": 1, "run_id": "0dbbcdbf63de", "created": time.time() - 60}))
    ledger = Ledger(path / "ledger", "7-supervisor-main")
    ledger.append("launch", time=time.time() - 60, job="7", nodes=["n1"])
    ledger.append("steps_planned", time=time.time() - 55, round=0, start=0, total=500)
    ledger.append("round", time=time.time() - 50, round=0, members=["n1"], world_size=1)
    ledger.append("first_step", time=time.time() - 40, round=0, step=1, restored=-1)
    return ledger


def tell(path: Path, step: int) -> None:
    agents = {"n1": {"step": step, "step_s": 0.1, "silent_s": 0.1}}
    told = {"time": time.time(), "phase": "running", "members": [{"node": "n1"}], "agents": agents}
    (path / "status.json").write_text(json.dumps(told))


def test_the_page_follows_the_run_and_keeps_what_is_opened(browser: Chromium, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ledger = started(run)
    tell(run, 100)
    with serving(PageServer(partial(_made, run, 0.1), fresh_s=0.05)) as server:
        browser.open(server.url)
        until(lambda: "Read at" in text_of(browser), "the first look", lambda: text_of(browser)[:500])
        assert "100 of 500" in text_of(browser)
        browser.of("document.querySelector('#causes details').open = true")
        for number in range(3):
            ledger.append("logged", rank=0, step=100 + number, values={"loss": 3.0 - number}, sums={"tokens": 9},
                          seconds=1.0, not_finite=[])  # fmt: skip
        tell(run, 250)
        until(lambda: "250 of 500" in text_of(browser), "the next step")
        until(lambda: "tokens/s" in text_of(browser) and "loss" in text_of(browser), "what is logged")
        assert browser.of("document.querySelector('#causes details').open")
        ended = {"verdict": "completed", "reason": "done", "exit_code": 0, "time": time.time(), "job": "7"}
        (run / "verdict.json").write_text(json.dumps(ended))
        until(lambda: "The run has ended" in text_of(browser) and "ended: completed" in text_of(browser), "the end")
        assert browser.said == []
        assert set(browser.asked) - {"data:,"} == {server.url}
    until(lambda: "Not up to date" in text_of(browser), "that the server is gone")
    browser.open("about:blank")  # else that page goes on asking


def test_a_hostile_run_runs_nothing(browser: Chromium, tmp_path: Path) -> None:
    run = write_hostile_run(tmp_path / "run")
    with serving(PageServer(partial(_made, run, 0.1), fresh_s=0.05)) as server:
        browser.open(server.url)
        until(lambda: "Read at" in text_of(browser), "the first look")
        assert browser.of("window.hit") is None and browser.of("document.querySelectorAll('script').length") == 1
        of_this_page = [one for one in browser.said if "CONNECTION_REFUSED" not in one]  # the page before may be late
        assert [one for one in of_this_page if "error" in one.lower()] == []
