"""A cluster whose slurm.conf names our hooks, as ``resilio install-hooks`` writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.demo.stage import binds
from resilio_hpc.prolog_epilog.hook_files import HookSettings, install, package_folder, render_conf
from resilio_hpc.slurm.devcluster import DevCluster, image
from tests.support.clusters import shared_mounts_or_skip, skip_without_slurm, unique_name

SITE = """
[mount-latency]
on_timeout = "drain"

[disk-space]
every_s = 2
"""


@pytest.fixture(scope="module", params=["22.05", pytest.param("26.05", marks=pytest.mark.slow)])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """Two nodes with prolog, epilog, task prolog and health check, and a /shared that can hang."""
    skip_without_slurm()
    shared_mounts_or_skip()
    series = request.param
    if not image.is_built(series) and series not in os.environ.get("RESILIO_TEST_SLURM", "").split(","):
        pytest.skip(f"no cached root with Slurm {series}; RESILIO_TEST_SLURM={series} builds it")
    where = hooks_folder(tmp_path_factory)
    hooks = HookSettings(
        where=where, package=package_folder(), interval_s=10, ttl_s=120, site=str(where / "health.toml")
    )
    install(hooks)
    (where / "health.toml").write_text(SITE)
    conf = [*render_conf(hooks), "PrologFlags=Alloc"]
    folders = [*map(str, binds()), str(hooks.where)]
    with DevCluster.start(
        unique_name(f"health{series.replace('.', '')}"), nodes=2, gpus=2, slurm=series, shared_mount="fuse",
        binds=folders, conf=conf, timeout_s=120.0,
    ) as running:  # fmt: skip
        yield running


def hooks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every user of the cluster can run them: pytest's own folders are private."""
    folder = tmp_path_factory.mktemp("hooks")
    for above in (folder, folder.parent, folder.parent.parent):
        above.chmod(0o755)
    return folder / "installed"
