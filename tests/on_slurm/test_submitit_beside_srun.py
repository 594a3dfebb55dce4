"""submitit and srun side by side: in heterogeneous jobs, in job arrays, and a step within a submitted function."""

from __future__ import annotations

import json
import re
import sys

import pytest

from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from tests.support.clusters import each_series
from tests.support.environments import SUPPORT
from tests.support.waiting import until

CLIENT = SUPPORT / "slurm" / "submitit_client.py"
HETEROGENEOUS = """#!/bin/bash
#SBATCH -N1 -n1 --time=10
#SBATCH hetjob
#SBATCH -N2 -n2 --time=10
"""
ARRAY = """#!/bin/bash
#SBATCH -N1 -n1 --time=10 --array=4-5
"""
# The user's Python goes on beside a step over all of the job, and submits jobs of its own meanwhile.
BESIDE = f"""
cd $FOLDER
{sys.executable} {CLIENT} steps $FOLDER > said.new 2> said.err && mv said.new said &
srun $GROUPS_OF_STEP printenv SLURMD_NODENAME > nodes
wait
"""


def outcome(cluster: DevCluster, script: str, *folders: str) -> list[dict[str, object]]:
    """Submit the script, and return what its Python said in each folder."""
    for folder in folders:
        (cluster.shared / folder).mkdir()
    (cluster.shared / "beside.sh").write_text(script)
    cluster.run("ctl", ["sbatch", "-o", "/dev/null", "/shared/beside.sh"])
    found = [cluster.shared / folder / "said" for folder in folders]

    def errors() -> str:
        return "\n".join(path.read_text() for path in cluster.shared.glob("*/said.err"))

    until(lambda: all(path.exists() for path in found), "the functions have not ended", errors)
    return [json.loads(path.read_text().splitlines()[-1]) for path in found]


def check(said: dict[str, object]) -> None:
    """The functions' steps ran on their own nodes, and no job took the surrounding one's number."""
    one, *tasks = [list(map(str, result)) for result in said["results"]]  # type: ignore[attr-defined]
    ids = said["ids"]
    assert isinstance(ids, list)
    assert [result[1] for result in (one, *tasks)] == ids
    assert re.fullmatch(r"\d+", ids[0]) and [name.partition("_")[2] for name in ids[1:]] == ["0", "1"]
    for number, result in enumerate((one, *tasks)):
        assert (result[0], result[3], result[4]) == (str(number), result[2], "")
    assert said["here"] == 9


@each_series(HOST_SERIES, slow=[NEWEST_SERIES])
def test_in_a_heterogeneous_job(cluster: DevCluster) -> None:
    script = HETEROGENEOUS + "FOLDER=/shared/het GROUPS_OF_STEP=--het-group=0,1" + BESIDE
    script += "echo 'print(1)' > one.py; for step in '' 'srun --het-group=1'; do\n"
    script += (
        f"$step {sys.executable} -m resilio_hpc.cli.resilio_launch one.py >> refused 2>&1; echo $? >> codes; done\n"
    )
    (said,) = outcome(cluster, script, "het")
    check(said)
    nodes = (cluster.shared / "het" / "nodes").read_text().split()
    assert len(set(nodes)) == 3
    codes = cluster.shared / "het" / "codes"
    until(lambda: codes.exists() and len(codes.read_text().split()) == 2, "resilio-launch has not ended")
    assert codes.read_text().split() == ["2", "2"]
    refused = (cluster.shared / "het" / "refused").read_text().splitlines()
    own = [line for line in refused if not line.startswith(("srun:", "slurmstepd:"))]
    assert len(own) == 3 and all("is heterogeneous (2 components), which is not supported" in line for line in own)


@pytest.mark.slow
@each_series(HOST_SERIES, NEWEST_SERIES)
def test_in_the_tasks_of_a_job_array(cluster: DevCluster) -> None:
    script = ARRAY + "FOLDER=/shared/task-$SLURM_ARRAY_TASK_ID GROUPS_OF_STEP=" + BESIDE
    for said in outcome(cluster, script, "task-4", "task-5"):
        check(said)
    assert all((cluster.shared / f"task-{task}" / "nodes").read_text().strip() for task in (4, 5))
