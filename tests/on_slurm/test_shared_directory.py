"""A /shared that hangs on one node or on all, and one that shows late what other nodes have done."""

from __future__ import annotations

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.process import Completed
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.clusters import own_cluster
from tests.support.requirements import need_shared_mounts


def read_shared(cluster: DevCluster, node: str, path: str, limit_s: float = 5.0) -> Completed:
    """``cat`` on a node; the exit code is -9 when it hung until ``limit_s``. Runs outside of /shared."""
    command = ["timeout", "--signal=KILL", str(limit_s), "cat", f"/shared/{path}"]
    return cluster.run(node, command, cwd="/", check=False)


def test_shared_hangs_on_one_node_or_on_all_and_answers_again() -> None:
    need_shared_mounts()
    with own_cluster("hang", why="its /shared hangs", nodes=2, shared_mount="fuse") as cluster:
        cluster.run("n1", ["sh", "-c", "echo written on n1 > /shared/file"])
        assert (cluster.shared / "file").read_text() == "written on n1\n"
        cluster.machines.hang_shared("n2")
        assert read_shared(cluster, "n2", "file", 0.5).returncode == -9
        assert read_shared(cluster, "n1", "file").stdout == "written on n1\n"
        cluster.machines.hang_shared()
        assert read_shared(cluster, "n1", "file", 0.5).returncode == -9
        assert cluster.run("ctl", ["cat", "/shared/file"]).stdout == "written on n1\n"
        cluster.machines.release_shared()
        assert read_shared(cluster, "n2", "file").stdout == "written on n1\n"


def test_a_hung_node_loses_power_and_boots_with_a_shared_that_answers() -> None:
    need_shared_mounts()
    with own_cluster("hang", why="its /shared hangs", nodes=2, shared_mount="fuse") as cluster:
        (cluster.shared / "file").write_text("here\n")
        cluster.machines.hang_shared()
        with cluster.spawn("n2", ["cat", "/shared/file"], cwd="/") as waiting:
            cluster.machines.crash("n2")
            assert waiting.wait(10.0) != 0
        cluster.machines.boot("n2")
        assert read_shared(cluster, "n2", "file").stdout == "here\n"


def test_a_caching_shared_shows_new_files_late_and_still_creates_exclusively() -> None:
    need_shared_mounts()
    with own_cluster("cache", why="its /shared caches", nodes=2, shared_mount="caching") as cluster:
        assert read_shared(cluster, "n2", "late").returncode == 1  # n2 has now learnt that there is no such file
        cluster.run("n1", ["sh", "-c", "echo 1 > /shared/late"])
        assert read_shared(cluster, "n2", "late").returncode == 1
        assert "late" in cluster.run("n2", ["ls", "/shared"]).stdout.split()
        exclusively = ["sh", "-c", "set -C; echo 2 > /shared/late"]
        assert cluster.run("n2", exclusively, check=False).returncode != 0
        assert (cluster.shared / "late").read_text() == "1\n"


def test_a_directly_mounted_shared_cannot_hang(cluster: DevCluster) -> None:
    with pytest.raises(UsageError, match="--shared-mount fuse"):
        cluster.machines.hang_shared()
