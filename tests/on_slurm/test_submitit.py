"""submitit's executor "resilio" on a real Slurm: round trips in which something breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import NEWEST_SERIES
from tests.support.clusters import each_series
from tests.support.environments import SUPPORT
from tests.support.waiting import PATIENCE_S, until

CLIENT = SUPPORT / "slurm" / "submitit_client.py"


class Client:
    """The user's Python on the login node, with a folder of its own."""

    def __init__(self, cluster: DevCluster, scenario: str) -> None:
        self.cluster = cluster
        self.folder = cluster.shared / f"submitit-{scenario}"
        self.folder.mkdir()
        argv = [sys.executable, str(CLIENT), scenario, f"/shared/{self.folder.name}"]
        self._process = cluster.spawn("ctl", argv, cwd=f"/shared/{self.folder.name}")

    def wait(self) -> dict[str, Any]:
        try:
            out, err = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(self.logs()) from None
        assert self._process.returncode == 0, err + self.logs()
        said: dict[str, Any] = json.loads(out.splitlines()[-1])
        return said

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.rglob("*_log.*")))

    def until(self, reached: Callable[[], object]) -> None:
        until(reached, "the jobs have not come so far", self.logs, alive=lambda: self._process.poll() is None)

    def job(self) -> int:
        """The first job."""
        self.until(lambda: list(self.folder.glob("jobs/*/*_submitted.pkl")))
        return int(next(self.folder.glob("jobs/*/*_submitted.pkl")).parent.name)


def a_lost_node(cluster: DevCluster) -> None:
    client = Client(cluster, "lost-node")
    client.until(lambda: len(list(client.folder.glob("started-*-0"))) == 2)
    number = client.job()
    batch_host = cluster.run("ctl", ["squeue", "-h", "-j", str(number), "-o", "%B"]).stdout.strip()
    training = {path.read_text() for path in client.folder.glob("started-*-0")}  # whoever enrolled last is the spare
    lost = min(training - {batch_host})
    cluster.machines.crash(lost)
    client.until(lambda: {path.name.split("-")[1] for path in client.folder.glob("started-*-[1-9]")} == {"0", "1"})
    (client.folder / "go").touch()
    said = client.wait()
    assert [result[:4] for result in said["results"]] == [[str(number), rank, 2, 2] for rank in (0, 1)]
    assert lost not in [result[4] for result in said["results"]]
    assert (said["id"], said["state"], said["nodes"]) == (str(number), "COMPLETED", 2)
    assert said["later"] == [9, 16]
    avoided = [cluster.run("ctl", ["scontrol", "show", "job", job]).stdout for job in said["ids"]]
    assert [f"ExcNodeList={lost}\n" in text for text in avoided] == [True, False], avoided


def test_a_job_survives_the_loss_of_a_node(cluster: DevCluster) -> None:
    a_lost_node(cluster)


def test_a_killed_rank_costs_a_restart_and_no_result_of_an_earlier_life_counts(cluster: DevCluster) -> None:
    said = Client(cluster, "killed").wait()
    assert said["results"] == ["rank 0 in round 1", "rank 1 in round 1"]
    assert "[rank 0] " in said["out"] and "[rank 1] " in said["out"]
    assert said["out1"] and "[rank" not in said["out1"]
    assert "rank 1 on n1 killed by SIGKILL" in said["err"]
    assert (said["torn_down"], said["at_once"]) == ("there\n", "CANCELLED")


@pytest.mark.slow
def test_a_checkpointable_function_goes_on_in_the_next_job(cluster: DevCluster) -> None:
    client = Client(cluster, "checkpoint")
    count = client.folder / "count"
    client.until(lambda: count.exists() and int(count.read_text() or 0) > 5)
    first = client.job()
    cluster.end_at_time_limit(first, after_s=30)
    client.until(lambda: cluster.job_state(first) != "RUNNING")
    reached = int(count.read_text())
    (client.folder / "fast").touch()
    said = client.wait()
    assert said["result"] == [200, [str(first), str(first + 1)]]
    assert said["id"] == str(first) and said["links"][:2] == [str(first), str(first + 1)]
    assert reached < 200 and said["state"] == "COMPLETED"


def a_time_limit_without_a_stop(cluster: DevCluster) -> None:
    client = Client(cluster, "timeout")
    first = client.job()
    client.until((client.folder / "lives").exists)
    cluster.end_at_time_limit(first, after_s=1)
    said = client.wait()
    assert said == {"result": [str(first), str(first + 1)], "id": str(first)}
    assert cluster.job_state(first) == "TIMEOUT"


@pytest.mark.slow
def test_a_chain_over_a_time_limit_gives_the_last_jobs_result(cluster: DevCluster) -> None:
    a_time_limit_without_a_stop(cluster)


def test_an_exception_reaches_the_user_with_the_verdict(cluster: DevCluster) -> None:
    said = Client(cluster, "failure").wait()
    assert "ValueError: no such data set" in said["exception"]
    assert said["state"] == "FAILED"


@pytest.mark.slow
def test_an_array_is_one_job_of_slurm(cluster: DevCluster) -> None:
    said = Client(cluster, "array").wait()
    assert said["results"] == [1, 4, 9]
    assert [name.partition("_")[2] for name in said["ids"]] == ["0", "1", "2"]
    assert len({name.partition("_")[0] for name in said["ids"]}) == 1


@pytest.mark.slow
def test_chained_commands_are_jobs_of_their_own(cluster: DevCluster) -> None:
    said = Client(cluster, "command").wait()
    assert said["results"] == ["a  b c", "a  b d"]
    assert len(set(said["ids"])) == 2 and all(name.isdecimal() for name in said["ids"])


def test_cancel_ends_the_chain(cluster: DevCluster) -> None:
    said = Client(cluster, "cancel").wait()
    assert len(said["links"]) == 2
    assert said["state"] == "CANCELLED"
    states = [cluster.job_state(int(job)) for job in said["links"]]
    assert states == ["CANCELLED", "CANCELLED"]


@pytest.mark.slow
@each_series(NEWEST_SERIES)
@pytest.mark.parametrize("what", [a_lost_node, a_time_limit_without_a_stop])
def test_the_same_with_a_newer_slurm(cluster: DevCluster, what: Callable[[DevCluster], None]) -> None:
    what(cluster)
