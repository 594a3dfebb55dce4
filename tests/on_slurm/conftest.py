"""Tests on real Slurm clusters: the worker's own, for the whole run, which each test gives back clean."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from resilio_hpc.devtools.demo.stage import binds
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from resilio_hpc.prolog_epilog.hooks.hook_files import HookSettings, install, package_folder, render_conf
from tests.support.clusters import ClusterPool, own_cluster, save_logs
from tests.support.environments import open_the_way_to
from tests.support.requirements import need_shared_mounts, need_slurm
from tests.support.slurm.chain_runs import begin

__all__ = ["begin"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs Slurm."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def clusters() -> Iterator[ClusterPool]:
    """The clusters of this worker."""
    pool = ClusterPool()
    yield pool
    pool.close()


@pytest.fixture
def cluster(clusters: ClusterPool, request: pytest.FixtureRequest) -> Iterator[DevCluster]:
    """Five idle nodes n1…n5 with two fake GPUs each; the series is the parameter, else this host's own Slurm."""
    series = getattr(request, "param", HOST_SERIES)
    need_slurm(series)
    running = clusters.take(series)
    yield running
    clusters.give_back(running)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Save the logs of a failed test's cluster, whichever fixture gave it, and say where."""
    report = yield
    given = getattr(item, "funcargs", {})
    running = next((value for value in given.values() if isinstance(value, DevCluster)), None)
    if report.failed and report.when != "teardown" and running is not None:
        sizes = given["clusters"].log_sizes if "clusters" in given else {}
        report.sections.append(("cluster", f"its logs are in {save_logs(running, item.nodeid, sizes)}"))
    return report


SITE = """
[mount-latency]
on_timeout = "drain"

[disk-space]
every_s = 2
"""


@pytest.fixture(scope="module", params=[HOST_SERIES, pytest.param(NEWEST_SERIES, marks=pytest.mark.slow)])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """Two nodes with prolog, epilog, task prolog and health check, and a /shared that can hang."""
    need_shared_mounts()
    series = request.param
    need_slurm(series)
    where = hooks_folder(tmp_path_factory)
    hooks = HookSettings(
        where=where, package=package_folder(), interval_s=10, ttl_s=120, site=str(where / "health.toml")
    )
    install(hooks)
    (where / "health.toml").write_text(SITE)
    conf = [*render_conf(hooks), "PrologFlags=Alloc"]
    with own_cluster(
        f"health{series.replace('.', '')}", why="its slurm.conf names hooks, and its /shared hangs", nodes=2, gpus=2,
        slurm=series, shared_mount="fuse", binds=[*binds(), hooks.where], conf=conf,
    ) as running:  # fmt: skip
        yield running


def hooks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every user of the cluster can run them: pytest's own folders are private."""
    folder = tmp_path_factory.mktemp("hooks")
    open_the_way_to(folder)
    return folder / "installed"
