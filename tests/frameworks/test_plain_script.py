"""A plain torchrun script that knows nothing of this package: restarted from its own checkpoints, to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import SUPPORT, scrubbed
from tests.support.frameworks.plain_script import COMMAND, EVERY, SCRIPT, STRUCK, begun, undisturbed_end
from tests.support.frameworks.runs import FrameworkRun
from tests.support.waiting import PATIENCE_S, until


def run(path: Path, *options: str, ranks: int = 2, **variables: str) -> FrameworkRun:
    return FrameworkRun(path, ranks, COMMAND, python=Path(sys.executable), options=options, **variables)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two ranks held at the end that were forked with torchrun's environment, without a launcher."""
    return undisturbed_end(tmp_path_factory.mktemp("undisturbed"))


def went_on(disturbed: FrameworkRun, said: str, undisturbed: list[str]) -> None:
    """It began again from its own checkpoint, and holds the bits of an undisturbed run."""
    assert begun(said) == [0, EVERY]
    assert disturbed.end == undisturbed


def test_it_knows_nothing_of_this_package() -> None:
    text = SCRIPT.read_text()
    assert "import resilio" not in text and "from resilio" not in text and "RESILIO" not in text


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("kill", "rank_killed"),
        pytest.param("raise", "rank_exception", marks=pytest.mark.slow),
        pytest.param("memory", "rank_exception", marks=pytest.mark.slow),
        pytest.param("exit", "rank_exception", marks=pytest.mark.slow),
        pytest.param("stop", "hang", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_costs_the_steps_since_its_own_save(
    tmp_path: Path, undisturbed: list[str], how: str, kind: str
) -> None:
    disturbed = run(tmp_path)
    went_on(disturbed, disturbed.launch(str(STRUCK), "1", how), undisturbed)
    (recovered,) = disturbed.events("recovered")
    assert (recovered["kind"], recovered["rank"]) == (kind, 1)


@pytest.mark.slow
def test_a_rank_that_loops_is_named_by_the_call_that_it_does_not_enter(tmp_path: Path, undisturbed: list[str]) -> None:
    """It is awaited until the limit that the user has set."""
    disturbed = run(tmp_path, "--hang-timeout", "3")
    went_on(disturbed, disturbed.launch(str(STRUCK), "1", "wait"), undisturbed)
    hang = disturbed.events("hang")[-1]
    assert (hang["kind"], hang["ranks"], hang["acted"]) == ("absent", [1], True)
    assert "did not enter all_reduce" in hang["evidence"]


@pytest.mark.slow
def test_where_ranks_are_to_start_again_alone_they_say_that_they_need_one_another(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    disturbed = run(tmp_path, "--restart-policy", "failed")
    went_on(disturbed, disturbed.launch(str(STRUCK), "1", "kill"), undisturbed)
    (told,) = disturbed.events("restarts_all")
    assert "they need one another" in told["reason"]


@pytest.mark.slow
def test_a_lost_agent_costs_the_steps_since_the_last_save(tmp_path: Path, undisturbed: list[str]) -> None:
    disturbed = run(tmp_path, "--spares", "1", ranks=1, RESILIO_LOCAL_NODES="3")
    launch = disturbed.start(str(STRUCK), "1", "wait")
    until((tmp_path / "struck").exists, "a step is under way", lambda: launch.poll())
    node = disturbed.events("round")[0]["members"][1]
    (agent,) = [event["pid"] for event in disturbed.events("agent") if event["node"] == node]
    os.kill(agent, signal.SIGKILL)
    said, _ = launch.communicate(timeout=PATIENCE_S)
    assert launch.returncode == 0, said[-3000:]
    disturbed.ranks = 2
    went_on(disturbed, said, undisturbed)


@pytest.mark.slow
def test_a_stop_before_the_end_is_gone_on_from(tmp_path: Path, undisturbed: list[str]) -> None:
    """As preemption and the time limit stop it: SIGTERM, and the same launch again."""
    stopped = run(tmp_path)
    launch = stopped.start(str(STRUCK), "1", "wait")
    until((tmp_path / "struck").exists, "a step is under way", lambda: launch.poll())
    launch.terminate()
    said, _ = launch.communicate(timeout=PATIENCE_S)
    assert launch.returncode == 128 + signal.SIGTERM and stopped.events("verdict")[-1]["verdict"] == "terminated"
    assert "it goes on from what the script itself has saved" in said
    went_on(stopped, said + stopped.launch(), undisturbed)


OURS = {"LD_PRELOAD", "RES_OPTIONS", "TORCHINDUCTOR_CACHE_DIR"}  # docs/launching.md says why


@pytest.mark.slow
@pytest.mark.parametrize("method", ["env://", "tcp://"])
def test_a_script_finds_what_it_finds_under_torchrun(tmp_path: Path, method: str) -> None:
    command = [str(SUPPORT / "frameworks" / "found_place.py"), method]
    both = []
    for name in ("torchrun", "ours"):
        one = FrameworkRun(tmp_path / name, 2, command, is_watched=False, python=Path(sys.executable))
        one.torchrun() if name == "torchrun" else one.launch()
        both.append([json.loads((tmp_path / name / f"found.{rank}").read_text()) for rank in range(2)])
    for theirs, ours in zip(*both, strict=True):
        assert set(ours.pop("names")) ^ set(theirs.pop("names")) <= OURS
        assert ours == theirs and ours["elastic"]


SAVES_ON_SIGTERM = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
done = int(open("saved").read()) if os.path.exists("saved") else 0
print("from", done, flush=True)
while done < int(sys.argv[1]) and not asked:
    time.sleep(0.01)
    done += 1
if os.environ["RANK"] == "0":
    with open("saved", "w") as file:
        file.write(str(done))
"""


def test_a_script_that_saves_on_sigterm_and_exits_with_0_is_not_complete(tmp_path: Path) -> None:
    """Its own way of stopping before a time limit."""
    (tmp_path / "train.py").write_text(SAVES_ON_SIGTERM)
    argv = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--no-torch", "train.py"]

    def launch(steps: int) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([*argv, str(steps)], cwd=tmp_path, env=scrubbed(), text=True, **pipes)

    first = launch(10**6)
    logs = tmp_path / "run" / "logs"
    until(lambda: any("from 0" in log.read_text() for log in logs.rglob("0.log")), "the rank", first.poll)
    first.terminate()
    said, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 128 + signal.SIGTERM, said
    saved = int((tmp_path / "saved").read_text())
    again = launch(saved + 1)
    said, _ = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0 and f"from {saved}" in said, said


@pytest.mark.slow
def test_torchrun_itself_ends_with_these_bits(tmp_path: Path, undisturbed: list[str]) -> None:
    plain = run(tmp_path)
    plain.torchrun()
    assert plain.end == undisturbed
