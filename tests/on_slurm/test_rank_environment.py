"""A rank's environment, variable by variable, beside what plain srun and torchrun give: docs/launching.md has the table
of all that may differ, and why."""

from __future__ import annotations

import fnmatch
import json
import re
import signal
import sys
from pathlib import Path

from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from tests.support.clusters import MIDDLE_SERIES, each_series
from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S

DUMP = """
import json, os, pathlib, signal, sys
way = sys.argv[1]
rank = os.environ.get("RANK", os.environ["SLURM_PROCID"])
seen = {"environment": dict(os.environ), "cwd": os.getcwd(), "path": [p for p in sys.path if "/proj" in p]}
names = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGCHLD", "SIGPIPE", "SIGXFSZ", "SIGCONT", "SIGALRM")
seen["handlers"] = {name: str(signal.getsignal(getattr(signal, name))) for name in names}
pathlib.Path(f"/shared/env/{way}.{rank}").write_text(json.dumps(seen))
"""
IGNORED, DEFAULT = str(int(signal.SIG_IGN)), str(int(signal.SIG_DFL))
JOB = """#!/bin/bash
export MARK="a
b" PYTHONPATH=lib:
cd /shared/env/proj
srun PYTHON -u tools/dump.py srun
srun --ntasks=2 --ntasks-per-node=1 PYTHON -m torch.distributed.run --nnodes=2 --nproc-per-node=2 \\
    --rdzv-backend=c10d --rdzv-endpoint=n1:29411 --max-restarts=3 tools/dump.py torchrun
PYTHON -m resilio_hpc.cli.resilio_launch --run-dir /shared/env/run --no-torch --nproc-per-node 2 tools/dump.py ours
"""


def allowed() -> list[tuple[str, set[str], str]]:
    """Rows of the table: patterns of names, what may differ from, why."""
    page = (ROOT / "docs/launching.md").read_text()
    section = page.partition("## The environment of a rank")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (srun|torchrun|both) \| (.+?) \|$", section, re.MULTILINE)
    assert len(rows) > 5
    return [
        (name, {"srun", "torchrun"} if where == "both" else {where}, why)
        for names, where, why in rows
        for name in re.findall(r"`([^`]+)`", names)
    ]


def seen(folder: Path, way: str) -> list[dict[str, object]]:
    return [json.loads((folder / f"{way}.{rank}").read_text()) for rank in range(4)]


@each_series(HOST_SERIES, slow=[*MIDDLE_SERIES, NEWEST_SERIES])
def test_a_rank_finds_what_srun_and_torchrun_would_give_it_but_for_what_the_table_says(cluster: DevCluster) -> None:
    folder = cluster.shared / "env"
    for name in ("proj/tools", "proj/lib"):
        (folder / name).mkdir(parents=True)
    (folder / "proj/tools/dump.py").write_text(DUMP)
    script = JOB.replace("PYTHON", sys.executable)
    job = cluster.submit(
        script, ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--no-kill", "--job-name=my-run", "--time=10"]
    )
    state = cluster.wait_for_job(job, ("COMPLETED", "FAILED", "TIMEOUT"), timeout_s=PATIENCE_S)
    assert state == "COMPLETED", "\n".join(path.read_text() for path in cluster.shared.glob("*.out"))
    rows, ours = allowed(), seen(folder, "ours")
    for way in ("srun", "torchrun"):
        for rank, (here, there) in enumerate(zip(ours, seen(folder, way), strict=True)):
            assert (here["cwd"], here["path"]) == (there["cwd"], there["path"]), (way, rank)
            handlers = dict(there["handlers"])  # type: ignore[call-overload]
            if way == "srun" and cluster.slurm_version.startswith(NEWEST_SERIES):
                assert handlers.pop("SIGTERM") == IGNORED, "docs/launching.md tells of it"
                handlers["SIGTERM"] = DEFAULT
            assert here["handlers"] == handlers, (way, rank)
            mine, other = dict(here["environment"]), dict(there["environment"])  # type: ignore[call-overload]
            names = {name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)}
            patterns = [pattern for pattern, ways, _ in rows if way in ways]
            unexplained = {
                name: (mine.get(name), other.get(name))
                for name in sorted(names)
                if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
            }
            assert unexplained == {}, f"rank {rank}: (ours, {way})"
