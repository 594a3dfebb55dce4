"""Lines for scrontab and cron: slurmctld takes those of the docs and of ``resilio drill schedule``, and runs them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import NEWEST_SERIES
from resilio_hpc.drills.schedule import DrillSchedule
from tests.support.clusters import own_cluster
from tests.support.environments import ROOT
from tests.support.pages import blocks
from tests.support.waiting import until

pytestmark = pytest.mark.slow
RESILIO = f"{sys.prefix}/bin/resilio"
HERE = {"/home/me/venv/bin/resilio": RESILIO, "/opt/resilio/bin/resilio": RESILIO, "/scratch/me": "/shared"}


def shown(page: str) -> list[str]:
    """The page's tables, with paths that exist here."""
    found = blocks(ROOT / "docs" / f"{page}.md", "crontab")
    for there, here in {**HERE, "/home/me": "/shared"}.items():
        found = [text.replace(there, here) for text in found]
    return found


def names(table: str) -> set[str]:
    return set(re.findall(r"--job-name=(\S+)", table))


@pytest.fixture(scope="module")
def cron() -> Iterator[DevCluster]:
    with own_cluster(
        "scron", why="ScronParameters=enable", nodes=1, slurm=NEWEST_SERIES, conf=["ScronParameters=enable"]
    ) as running:
        yield running


def installed(cron: DevCluster, table: str) -> dict[str, str]:
    """The jobs that slurmctld has made of a table: state by name."""
    (cron.shared / "table").write_text(table)
    cron.run("ctl", ["scrontab", "/shared/table"])
    assert cron.run("ctl", ["scrontab", "-l"]).stdout.strip() == table.strip()
    listed = cron.run("ctl", ["squeue", "-h", "-o", "%j %T %r"]).stdout
    return {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in listed.splitlines()}


def test_the_lines_of_the_pages_and_of_drills_are_taken(cron: DevCluster) -> None:
    drills = DrillSchedule(
        names=("rank-sigkill",), command=(RESILIO,), evidence=Path("/shared/drills"), hour=3, minute=17, day=1,
        run=Path("/shared/run"), jitter_s=60, limit_s=3600,
    )  # fmt: skip
    tables = [text for page in ("alerts", "site") for text in shown(page) if "#SCRON" in text]
    assert len(tables) == 2
    for table in [*tables, "\n".join(drills.scrontab()) + "\n"]:
        made = installed(cron, table)
        assert names(table) and names(table) <= set(made)
        assert {made[name] for name in names(table)} == {"PENDING BeginTime"}


def test_slurm_runs_a_line(cron: DevCluster) -> None:
    (cron.shared / "resilio-runs").mkdir()
    (table,) = [text for text in shown("site") if "#SCRON" in text]
    installed(cron, re.sub(r"^\*/\d+ ", "* ", table, flags=re.MULTILINE).replace("--mem=1G ", ""))
    output = cron.shared / "runs.json"
    until(lambda: output.exists() and output.read_text().strip().endswith("}"), "the line has not run", cron.status)
    assert json.loads(output.read_text())["runs"] == []
    cron.run("ctl", ["scrontab", "-r"])


def test_the_line_for_cron_keeps_a_verdict(cron: DevCluster) -> None:
    """As cron starts it: by sh, as root, with nearly no environment."""
    lines = [line for text in shown("site") for line in text.splitlines() if " root " in line]
    assert len(lines) == 2
    for line in lines:
        command = line.split(" root ")[1]
        assert len(line.split(" root ")[0].split()) == 5
        done = cron.run("n1", ["env", "-i", "PATH=/usr/bin:/bin", "/bin/sh", "-c", command], check=False)
        assert done.returncode in (0, 1), done.stderr  # 1: a finding, on this machine
        assert "Traceback" not in done.stderr
    verdict = cron.run("n1", [RESILIO, "health", "why", "--json"], check=False)
    assert json.loads(verdict.stdout), verdict.stderr
