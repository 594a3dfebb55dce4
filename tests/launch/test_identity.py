"""An agent that is started again finds what it needs on its node, whatever the run directory does."""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.rundir import node_directories, notify_targets, run_directory
from resilio_hpc.launch.rundir.identity import forget, identify
from resilio_hpc.launch.rundir.notify_targets import parse_target


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentSettings]:
    local = tempfile.mkdtemp()  # short: the path of a socket in it has at most 107 bytes
    monkeypatch.setenv("RESILIO_LOCAL_DIR", local)
    run = run_directory.open_run(tmp_path / "run")
    notify_targets.put_away(run.path, (parse_target("https://example.org/hook"),))
    options = LaunchOptions(script="train.py", kind="script", run_dir=str(run.path))
    yield AgentSettings(options, "n1", "7", ("n1",), "n1", run_id=run.run_id)
    shutil.rmtree(local)


def test_the_second_agent_of_a_node_needs_no_run_directory(settings: AgentSettings, tmp_path: Path) -> None:
    first = identify(settings)
    (tmp_path / "run").rename(tmp_path / "away")
    assert identify(settings) == first
    assert [target.text for target in first[1]] == ["https://example.org/hook"]


def test_what_is_kept_is_for_us_alone(settings: AgentSettings) -> None:
    run, _ = identify(settings)
    directory = node_directories.local(run.run_id, "n1")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "identity.json").stat().st_mode & 0o777 == 0o600


def test_another_job_or_a_spoilt_file_reads_the_run_directory_again(settings: AgentSettings, tmp_path: Path) -> None:
    run, _ = identify(settings)
    notify_targets.put_away(run.path, ())
    assert identify(msgspec.structs.replace(settings, job="8"))[1] == ()
    directory = node_directories.local(run.run_id, "n1")
    (directory / "identity.json").write_text('{"job": "7"')
    assert identify(settings) == (run, ())


def test_what_stays_behind_holds_neither_secret_nor_webhook(settings: AgentSettings) -> None:
    run, _ = identify(settings)
    directory = node_directories.local(run.run_id, "n1")
    (directory / "spool").mkdir()
    assert base64.b64encode(run.secret) in (directory / "identity.json").read_bytes()
    forget(directory)
    assert [path.name for path in directory.iterdir()] == ["spool"]
    forget(directory)  # whoever comes second
