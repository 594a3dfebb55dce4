"""Pure parts of the dev cluster: configuration texts, and what is read from the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.devtools.devcluster.files import remove
from resilio_hpc.devtools.devcluster.image import debian_mirror
from resilio_hpc.devtools.devcluster.interpreter import missing_libraries
from resilio_hpc.devtools.devcluster.node import disk_mounts
from resilio_hpc.devtools.devcluster.slurm_conf import render_gres_conf, render_slurm_conf
from resilio_hpc.devtools.devcluster.spec import ClusterSpec, validate
from tests.support.environments import open_the_way_to
from tests.support.security.another_user import as_another_user, needs_root


def test_given_settings_replace_ours_and_given_partitions_are_added() -> None:
    conf = ("killwait=9", "Prolog=/shared/prolog.sh", "PartitionName=low Nodes=ALL")
    lines = render_slurm_conf(ClusterSpec(name="a", conf=conf)).splitlines()
    assert [line for line in lines if line.lower().startswith("killwait")] == ["KillWait=9"]
    assert "Prolog=/shared/prolog.sh" in lines
    assert [line.split()[0] for line in lines if line.startswith("PartitionName")] == [
        "PartitionName=main",
        "PartitionName=low",
    ]


def test_settings_that_newer_slurm_refuses_are_left_out() -> None:
    assert "TaskPlugin=task/none" in render_slurm_conf(ClusterSpec(name="a"))
    assert "TaskPlugin" not in render_slurm_conf(ClusterSpec(name="a", series="26.05"))


@pytest.mark.parametrize(
    ("gpus", "rootless", "expected"),
    [
        (0, False, ""),
        (1, False, "Name=gpu Type=h100 File=/dev/fakegpu0\n"),
        (4, False, "Name=gpu Type=h100 File=/dev/fakegpu[0-3]\n"),
        (2, True, "Name=gpu Type=h100 File=/dev/tty[0-1]\n"),
    ],
)
def test_gpus_are_character_devices(gpus: int, rootless: bool, expected: str) -> None:
    assert render_gres_conf(ClusterSpec(name="a", gpus=gpus, rootless=rootless)) == expected


def test_nodes_may_have_gpus_of_several_types() -> None:
    spec = ClusterSpec(name="a", nodes=4, gpus=2, gpu_type="h200,h200,a100")
    assert render_gres_conf(spec) == (
        "NodeName=n[1-2] Name=gpu Type=h200 File=/dev/fakegpu[0-1]\n"
        "NodeName=n[3-4] Name=gpu Type=a100 File=/dev/fakegpu[0-1]\n"
    )
    lines = [line for line in render_slurm_conf(spec).splitlines() if line.startswith("NodeName")]
    assert [(line.split()[0], line.partition("Gres=")[2].split()[0]) for line in lines] == [
        ("NodeName=n[1-2]", "gpu:h200:2"),
        ("NodeName=n[3-4]", "gpu:a100:2"),
    ]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (ClusterSpec(name="Bad_Name"), "Bad_Name"),
        (ClusterSpec(name="../up"), "../up"),
        (ClusterSpec(name="a", nodes=0), "0 nodes"),
        (ClusterSpec(name="a", series="19.05"), "19.05"),
        (ClusterSpec(name="a", gpu_type="h 100"), "gpu-type .h 100."),
        (ClusterSpec(name="a", conf=("KillWait",)), "KillWait"),
        (ClusterSpec(name="a", binds=("/no/such/path",)), "/no/such/path"),
        (ClusterSpec(name="a", rootless=True, accounting=True), "rootless"),
        (ClusterSpec(name="a", rootless=True, shared_mount="fuse"), "shared-mount needs root"),
        (ClusterSpec(name="a", shared_mount="nfs"), "nfs"),
    ],
)
def test_what_cannot_be_built_is_named(spec: ClusterSpec, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        validate(spec)


def test_machines_have_distinct_addresses() -> None:
    spec = ClusterSpec(name="a", nodes=200)
    assert len({spec.address(machine) for machine in spec.machines}) == 201
    assert spec.address("n1") != ClusterSpec(name="b").address("n1")


def test_the_main_archive_is_chosen_from_apts_sources() -> None:
    listed = ["http://one/debian-security/ main", "http://one/other/ main", "http://one/debian/ contrib"]
    assert debian_mirror("\n".join([*listed, "http://two/debian/ main"])) == "http://two/debian/"
    assert debian_mirror("") == ""


def test_only_real_file_systems_are_shown_on_machines() -> None:
    lines = [
        "22 1 0:20 / / rw - ext4 /dev/vda rw",
        "23 22 0:21 / /proc rw - proc proc rw",
        "24 22 0:22 / /usr rw - ext4 /dev/vdb rw",
        "25 24 0:23 / /usr/local rw - ext4 /dev/vdc rw",
        r"26 22 0:24 / /home\040dir rw shared:1 - nfs4 server:/home rw",
        "27 22 0:25 / /run/user/0 rw - ext4 /dev/vdd rw",
    ]
    assert disk_mounts("\n".join(lines)) == ["/usr", "/home dir"]


def test_only_libraries_that_the_image_lacks_are_shown(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libz.so.1").touch()
    needed = {"libz.so.1": "/lib/libz.so.1", "libffi.so.7": "/lib/libffi.so.7", "libpython.so": "/opt/py/libpython.so"}
    assert missing_libraries(needed, tmp_path) == ("/lib/libffi.so.7",)


@needs_root
def test_another_users_cluster_is_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIO_DEVCLUSTER_DIR", str(tmp_path))
    open_the_way_to(tmp_path)
    (tmp_path / "theirs").mkdir()

    def down() -> str:
        try:
            return str(remove("theirs"))
        except UsageError as error:
            return str(error)

    assert as_another_user(down) == "dev cluster theirs belongs to user 0, who alone can end it (or root)"
    assert remove("nothing") is False
