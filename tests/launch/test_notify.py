"""Notifications with real servers and commands: what arrives, and that nothing which hangs or fails matters."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.launch.notify.notify import Notifier
from resilio_hpc.launch.notify.sender import deliver
from resilio_hpc.launch.rundir.notify_targets import parse_target
from resilio_hpc.launch.rundir.run_directory import RunIdentity
from tests.support import waiting
from tests.support.launch.webhook_server import Server
from tests.support.waiting import PATIENCE_S

NODE_LOST = ("node_lost", {"node": "n2", "silent_s": 5.1})
VERDICT = ("verdict", {"verdict": "completed", "reason": "every rank exited with 0"})


@pytest.fixture
def ok() -> Iterator[Server]:
    server = Server(200)
    yield server
    server.close()


class Records(list[tuple[str, dict[str, Any]]]):
    def __call__(self, kind: str, /, **fields: Any) -> None:
        self.append((kind, fields))


def notifier(tmp_path: Path, *targets: str) -> tuple[Notifier, Records]:
    records = Records()
    run = RunIdentity(tmp_path / "run 42", "abcdef", b"")
    return Notifier(run, "7", records, tuple(parse_target(target) for target in targets)), records


def until(told: Notifier, done: Any) -> None:
    waiting.until(lambda: told.tick() or done(), "what the targets are told")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_webhook_gets_json_with_a_text_for_people(ok: Server, tmp_path: Path) -> None:
    told, records = notifier(tmp_path, ok.url)
    told.take(*NODE_LOST)
    until(told, lambda: ok.received)
    told.close()
    path, message = ok.received[0]
    assert path == "/SECRET"
    assert message["text"] == "run 42: node n2 lost: silent for 5.10 s"
    assert {name: message[name] for name in ("event", "node", "job", "run_id", "v")} == {
        "event": "node_lost", "node": "n2", "job": "7", "run_id": "abcdef", "v": 1,
    }  # fmt: skip
    assert message["id"] == "abcdef/7/node_lost/n2 round -1"
    assert records == []


def test_a_command_gets_the_event_on_its_input_and_in_its_environment(tmp_path: Path) -> None:
    out = tmp_path / "out with space"
    script = 'cat > "$1.part"; echo "$RESILIO_EVENT|$RESILIO_NODE|$RESILIO_RUN_DIR" >> "$1.part"; mv "$1.part" "$1"'
    told, _ = notifier(tmp_path, f"sh -c '{script}' sh '{out}'")
    told.take(*NODE_LOST)
    until(told, out.exists)
    told.close()
    message, variables = out.read_text().splitlines()
    assert json.loads(message)["event"] == "node_lost"
    assert variables == f"node_lost|n2|{tmp_path / 'run 42'}"


def test_the_verdict_is_sent_before_the_agent_ends_though_a_pause_is_on(ok: Server, tmp_path: Path) -> None:
    told, records = notifier(tmp_path, ok.url)
    told.take(*NODE_LOST)
    until(told, lambda: ok.received)
    told.take(*VERDICT)
    told.close(PATIENCE_S)
    assert [message["event"] for _, message in ok.received] == ["node_lost", "verdict"]
    assert records == []


def test_a_server_error_is_tried_again() -> None:
    server = Server(500, 200)
    assert deliver(parse_target(server.url), {"text": "x"}, PATIENCE_S, retry_after_s=0.0) == ""
    assert len(server.received) == 2
    server.close()


@pytest.mark.parametrize(("status", "attempts"), [(500, 2), (429, 2), (404, 1), (302, 1)])
def test_a_status_that_is_no_success_is_a_failure(status: int, attempts: int) -> None:
    server = Server(status)
    told = deliver(parse_target(server.url), {"text": "x"}, PATIENCE_S, retry_after_s=0.0)
    assert told == f"HTTP status {status}"
    assert [path for path, _ in server.received] == ["/SECRET"] * attempts, "and no redirect is followed"
    server.close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_other_failures_are_told_without_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cases = {
            f"http://127.0.0.1:{closed_port()}/SECRET": (PATIENCE_S, "Connection refused"),
            f"http://127.0.0.1:{silent.getsockname()[1]}/SECRET": (0.1, "no answer within 0.1 s"),
            "no-such-command SECRET": (PATIENCE_S, "cannot start (No such file or directory)"),
            "sh -c 'echo at SECRET >&2; exit 3' SECRET": (PATIENCE_S, "exit code 3: at …"),
            "sleep 600": (0.1, "not done in 0.1 s"),
        }
        for target, (timeout_s, why) in cases.items():
            assert deliver(parse_target(target), {"text": "x"}, timeout_s, retry_after_s=0.0) == why


def test_a_target_that_fails_is_in_the_ledger_once_and_hides_no_other(ok: Server, tmp_path: Path) -> None:
    bad = Server(404)
    told, records = notifier(tmp_path, bad.url, ok.url)
    told.take(*NODE_LOST)
    until(told, lambda: ok.received and records)
    told.take(*VERDICT)
    told.close(PATIENCE_S)
    bad.close()
    assert [message["event"] for server in (bad, ok) for _, message in server.received] == ["node_lost", "verdict"] * 2
    name = bad.url.removesuffix("/SECRET")
    assert records == [("notify_failed", {"target": f"webhook {name}", "error": "HTTP status 404"})]


def test_a_target_that_hangs_is_killed_and_blocks_nobody(ok: Server, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told, records = notifier(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}/", ok.url)
        told._channels[0].answer_timeout_s = 0.3  # less than the child's own limit, as if that had failed
        told.take(*NODE_LOST)
        until(told, lambda: records and ok.received)
        assert records[0][1]["error"] == "no answer within 0.3 s"
        told.take(*VERDICT)
        until(told, lambda: len(ok.received) == 2)
        told.close(PATIENCE_S)
    assert records[1:] == [], "it failed before and still does: said once"


def test_a_command_that_outlives_the_agent_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    told, records = notifier(tmp_path, f"sh -c 'echo $$ > {pid_file}.part; mv {pid_file}.part {pid_file}; sleep 600'")
    told.take(*NODE_LOST)
    until(told, pid_file.exists)
    told.close(0.1)
    assert records == [("notify_failed", {"target": "command sh", "error": "not delivered before the agent's end"})]
    until(told, lambda: not _runs(int(pid_file.read_text())))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_targets_nothing_is_started(tmp_path: Path) -> None:
    told, records = notifier(tmp_path)
    told.take(*NODE_LOST)
    told.tick()
    told.close()
    assert records == []


def test_the_sending_process_runs_before_anything_is_wrong(ok: Server, tmp_path: Path) -> None:
    """When a file system hangs that holds the interpreter, none can be started."""
    told, _ = notifier(tmp_path, ok.url)
    told.take("informed", {"committed": [], "last_round": -1})
    (channel,) = told._channels
    child = channel._child
    assert child is not None
    told.take(*NODE_LOST)
    until(told, lambda: ok.received)
    assert channel._child is child
    told.close()
