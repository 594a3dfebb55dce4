"""Settings broken on purpose, each on a real broken thing, and each named by its check."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.doctor.machines import REFUSING, Said, doctor, packages_without
from tests.support.environments import ROOT
from tests.support.mounts import mounted
from tests.support.requirements import need_program, need_root

HOSTS = "mount --bind $PWD/hosts /etc/hosts; mount --bind $PWD/resolv /etc/resolv.conf; hostname doctored"


def shm(tmp_path: Path, options: str, then: str = "") -> Said:
    setup = f"mount -t tmpfs -o {options} tmpfs /dev/shm; {then}"
    return doctor("shared-memory", cwd=tmp_path, setup=setup, namespaces=["mount"])


def names(tmp_path: Path, hosts: str, *words: str, **variables: str | Path) -> Said:
    (tmp_path / "hosts").write_text(hosts)
    (tmp_path / "resolv").write_text("")
    setup = f"ip link set lo up; {HOSTS}"
    return doctor("host-name", *words, cwd=tmp_path, setup=setup, namespaces=["mount", "uts", "net"], **variables)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_tiny_shared_memory_is_named(tmp_path: Path) -> None:
    said = shm(tmp_path, "size=64m")
    assert (said.code, said.one("shared-memory")["state"]) == (0, "warning")
    assert said.one("shared-memory")["seen"].startswith("small: 64 MiB of 64 MiB free")


def test_a_full_shared_memory_is_named(tmp_path: Path) -> None:
    said = shm(tmp_path, "size=1m", "head -c 1m /dev/zero > /dev/shm/full")
    assert (said.code, said.one("shared-memory")["state"]) == (1, "failed")
    assert "/dev/shm is full" in said.one("shared-memory")["seen"]


def test_a_read_only_shared_memory_is_named(tmp_path: Path) -> None:
    said = shm(tmp_path, "ro")
    assert (said.code, said.one("shared-memory")["state"]) == (1, "failed")
    assert "Read-only file system" in said.one("shared-memory")["seen"]


def test_a_shared_memory_on_a_disk_is_named(disk_path: Path) -> None:
    setup = "mkdir -m 1777 shm; mount --bind $PWD/shm /dev/shm"
    said = doctor("shared-memory", cwd=disk_path, setup=setup, namespaces=["mount"])
    assert said.one("shared-memory")["state"] == "warning"
    assert "not in memory" in said.one("shared-memory")["seen"]


def test_missing_huge_pages_are_named(tmp_path: Path) -> None:
    said = doctor("huge-pages", cwd=tmp_path, wrapper=[sys.executable, str(REFUSING), "huge_pages"])
    assert said.one("huge-pages")["state"] == "notice"
    assert said.one("huge-pages")["seen"].startswith("snapshots get none")


# -- kernel and limits -------------------------------------------------------------------------------------------------


def test_a_refused_io_uring_is_named(tmp_path: Path) -> None:
    said = doctor("io-uring", cwd=tmp_path, wrapper=[sys.executable, str(REFUSING), "io_uring"])
    assert (said.code, said.one("io-uring")["state"]) == (0, "notice")
    assert "seccomp" in said.one("io-uring")["seen"]


def test_a_low_limit_on_open_files_is_named(tmp_path: Path) -> None:
    said = doctor("open-files", cwd=tmp_path, setup="ulimit -n 64", namespaces=[])
    assert said.one("open-files")["state"] in ("warning", "failed")  # by the number of processors
    assert said.one("open-files")["seen"].startswith("64, and up to 64")


def test_a_limit_on_open_files_with_which_no_launch_starts_fails(tmp_path: Path) -> None:
    said = doctor("open-files", cwd=tmp_path, setup="ulimit -n 34")
    assert (said.code, said.one("open-files")["state"]) == (1, "failed")
    assert "raise it (ulimit -Hn)" in said.one("open-files")["seen"]


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("-f 2048", "files up to"), ("-v 67108864", "65536 MiB of address space"), ("-t 3600", "3600 s of CPU time"),
    ],
)  # fmt: skip
def test_a_limit_that_ends_ranks_is_named(tmp_path: Path, limit: str, words: str) -> None:
    said = doctor("limits", cwd=tmp_path, setup=f"ulimit {limit}")
    assert (said.code, said.one("limits")["state"]) == (0, "warning")
    assert words in said.one("limits")["seen"]


# -- network -----------------------------------------------------------------------------------------------------------


def test_a_name_without_an_address_is_named(tmp_path: Path) -> None:
    said = names(tmp_path, "127.0.0.1 localhost\n")
    assert (said.code, said.one("host-name")["state"]) == (0, "warning")
    assert said.one("host-name")["seen"].startswith("doctored has no address")


def test_on_a_machine_of_slurm_a_name_without_an_address_fails(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=none\n")
    said = names(tmp_path, "127.0.0.1 localhost\n", SLURM_CONF=tmp_path / "slurm.conf")
    assert (said.code, said.one("host-name")["state"]) == (1, "failed")


def test_a_name_that_stands_for_a_loopback_address_is_named(tmp_path: Path) -> None:
    said = names(tmp_path, "127.0.1.1 doctored\n")
    assert (said.code, said.one("host-name")["state"]) == (0, "warning")
    assert said.one("host-name")["seen"] == "doctored is 127.0.1.1, a loopback address"
    assert "in the place of 127.0.1.1" in said.one("host-name")["todo"]


def test_in_a_job_the_address_on_the_way_to_the_other_nodes_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.1.1 doctored\n10.9.8.2 other\n")
    (tmp_path / "resolv").write_text("")
    wire = "ip link add wire type bridge; ip address add 10.9.8.1/24 dev wire; ip link set wire up"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "doctored,other", "SLURMD_NODENAME": "doctored"}
    said = doctor(
        "host-name",
        cwd=tmp_path,
        setup=f"ip link set lo up; {wire}; {HOSTS}",
        namespaces=["mount", "uts", "net"],
        **job,
    )
    assert (said.code, said.one("host-name")["state"]) == (0, "notice")
    assert said.one("host-name")["seen"].endswith("a loopback address; other nodes are given 10.9.8.1")


def test_a_name_with_an_address_is_fine(tmp_path: Path) -> None:
    assert names(tmp_path, "10.9.8.7 doctored\n").one("host-name")["state"] == "ok"


def test_a_loopback_that_is_down_is_named(tmp_path: Path) -> None:
    said = doctor("loopback", cwd=tmp_path, namespaces=["net"])
    assert (said.code, said.one("loopback")["state"]) == (1, "failed")
    assert "ip link set lo up" in said.one("loopback")["todo"]


def test_an_address_that_is_not_this_machines_is_named(tmp_path: Path) -> None:
    said = names(tmp_path, "10.9.8.7 doctored\n", "loopback")
    assert said.one("loopback")["state"] == "failed"
    assert "does not reach itself at 10.9.8.7" in said.one("loopback")["seen"]


RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


def test_a_range_of_few_ports_is_named(tmp_path: Path) -> None:
    setup = f"ip link set lo up; echo 40000 40099 > {RANGE}"
    said = doctor("ports", cwd=tmp_path, setup=setup, namespaces=["net"])
    assert said.one("ports")["state"] == "warning"
    assert said.one("ports")["seen"].startswith("100 ports, 40000 to 40099")


def test_ports_that_are_all_taken_are_named(tmp_path: Path) -> None:
    setup = f"ip link set lo up; echo 40000 40000 > {RANGE}"
    holder = [sys.executable, str(REFUSING), "port-40000"]
    said = doctor("ports", "loopback", cwd=tmp_path, setup=setup, namespaces=["net"], wrapper=holder)
    assert (said.code, said.one("ports")["state"]) == (1, "failed")
    assert "Address already in use" in said.one("ports")["seen"]
    assert said.one("loopback")["seen"] == "not tried, since this failed: ports"


# -- directories -------------------------------------------------------------------------------------------------------


def in_run_directory(tmp_path: Path, directory: Path, *words: str) -> Said:
    return doctor("run-directory", "direct-io", *words, "--run-dir", str(directory), cwd=tmp_path)


def test_a_read_only_run_directory_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "run", "ro") as run:
        said = in_run_directory(tmp_path, run)
    assert (said.code, said.one("run-directory")["state"]) == (1, "failed")
    assert "is on a read-only file system" in said.one("run-directory")["seen"]
    assert said.one("direct-io")["state"] == "not here"


def test_a_full_run_directory_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "run", "size=2m") as run:
        (run / "large").write_bytes(bytes((2 << 20) - 4096))
        said = in_run_directory(tmp_path, run / "new")
    assert (said.code, said.one("run-directory")["state"]) == (1, "failed")
    assert said.one("run-directory")["seen"].endswith("it is full")


def test_a_run_directory_without_inodes_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "run", "nr_inodes=1") as run:
        said = in_run_directory(tmp_path, run / "new")
    assert (said.code, said.one("run-directory")["state"]) == (1, "failed")
    assert said.one("run-directory")["seen"].endswith("but no more files")


def test_a_run_directory_in_which_others_write_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "run", "size=100m,mode=1777") as run:
        said = in_run_directory(tmp_path, run)
    assert (said.code, said.one("run-directory")["state"]) == (1, "failed")
    assert said.one("run-directory")["todo"] == f"name a new directory in it: --run-dir {run}/NAME"


def test_a_small_run_directory_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "run", "size=100m") as run:
        said = in_run_directory(tmp_path, run / "new")
    assert (said.code, said.one("run-directory")["state"]) == (0, "warning")


def test_a_run_directory_without_direct_io_is_named(tmp_path: Path) -> None:
    setup = "mkdir run; mount -t ramfs ramfs run"
    said = doctor("direct-io", "--run-dir", "run", cwd=tmp_path, setup=setup, namespaces=["mount"])
    assert (said.one("direct-io")["state"], said.one("direct-io")["seen"]) == ("notice", "ramfs refuses it")


def test_a_run_directory_of_another_user_is_named(tmp_path: Path) -> None:
    need_root()
    run = tmp_path / "run"
    run.mkdir()
    os.chown(run, 20001, 20001)
    said = in_run_directory(tmp_path, run)
    assert (said.code, said.one("run-directory")["state"]) == (1, "failed")
    assert "belongs to user 20001" in said.one("run-directory")["seen"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--force-user=20001"], "new files belong to user 20001"),  # as of root, on NFS with root_squash
        (["--create-with-perms=a+rw", "--perms=a+rw"], "files cannot be closed to other users"),  # as on vfat or CIFS
        (["--rename-deny"], "it does not do what a run needs"),
    ],
)
def test_a_file_system_that_does_not_do_what_a_run_needs_is_named(
    tmp_path: Path, options: list[str], words: str
) -> None:
    need_program("bindfs", package="bindfs")
    setup = "mkdir behind run; bindfs {} behind run".format(" ".join(options))
    said = doctor("run-directory", "--run-dir", "run/new", cwd=tmp_path, setup=setup, namespaces=["mount"])
    assert (said.code, said.one("run-directory")["state"]) == (1, "failed")
    assert words in said.one("run-directory")["seen"]


def test_a_local_directory_that_is_too_deep_for_a_socket_is_named(tmp_path: Path, local: Path) -> None:
    deep = local / ("d" * (70 - len(str(local))))  # a socket fits, but not in an agent's directory
    deep.mkdir()
    said = doctor("local-directory", cwd=tmp_path, RESILIO_LOCAL_DIR=deep)
    assert (said.code, said.one("local-directory")["state"]) == (1, "failed")
    assert "RESILIO_LOCAL_DIR" in said.one("local-directory")["todo"]


def test_a_local_directory_in_which_others_may_rename_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    said = doctor("local-directory", cwd=tmp_path, RESILIO_LOCAL_DIR=tmp_path)
    assert (said.code, said.one("local-directory")["state"]) == (1, "failed")
    assert "sticky bit" in said.one("local-directory")["seen"]


def test_missing_local_checkpoints_are_named(tmp_path: Path) -> None:
    said = doctor("local-checkpoints", "--local-checkpoints", "gone", cwd=tmp_path)
    assert (said.code, said.one("local-checkpoints")["state"]) == (1, "failed")
    assert said.one("local-checkpoints")["todo"] == "make that directory, on every node"


def test_local_checkpoints_in_memory_are_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "local", "size=100m") as local:
        said = doctor("local-checkpoints", "--local-checkpoints", str(local), cwd=tmp_path)
    assert (said.code, said.one("local-checkpoints")["state"]) == (0, "warning")


# -- installation ------------------------------------------------------------------------------------------------------


def test_extensions_that_were_not_built_are_named(tmp_path: Path) -> None:
    setup = f"mkdir bare; cp -r {ROOT}/native/*.py {ROOT}/native/portable bare; mount --bind bare {ROOT}/native"
    said = doctor("extensions", "io-uring", "direct-io", cwd=tmp_path, setup=setup, namespaces=["mount"])
    assert (said.code, said.one("extensions")["state"]) == (0, "warning")
    assert "saves and restores take longer" in said.one("extensions")["means"]
    assert said.one("io-uring")["state"] == "not here"
    assert said.one("direct-io")["state"] == "ok"


def test_a_damaged_native_package_is_named(tmp_path: Path) -> None:
    setup = f"mkdir bare; cp {ROOT}/native/*.py bare; mount --bind bare {ROOT}/native"
    said = doctor("extensions", "io-uring", "shared-memory", cwd=tmp_path, setup=setup, namespaces=["mount"])
    assert (said.code, said.one("extensions")["state"]) == (1, "failed")
    assert "pip install --force-reinstall ." in said.one("extensions")["todo"]
    assert said.one("io-uring")["seen"] == "not tried, since this failed: extensions"
    assert said.one("shared-memory")["state"] == "ok"


def test_missing_packages_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    python = packages_without(tmp_path / "env", "torch", "h5py", "rich")
    said = doctor("--quick", cwd=tmp_path, python=str(python))
    assert (said.code, said.one("packages")["state"]) == (1, "failed")
    assert said.one("packages")["todo"] == "pip install --force-reinstall h5py rich"
    assert said.one("torch")["state"] == "notice"
    assert "failed" not in {one["state"] for one in said.found["checks"] if one["name"] != "packages"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "ImportError: libcudart.so.12"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process ended by SIGSEGV at import torch"),
        ("import no_such_module_at_all", "not installed"),
        (None, "nothing is in"),
    ],
)
def test_a_torch_that_is_broken_is_named(tmp_path: Path, source: str | None, words: str) -> None:
    python = packages_without(tmp_path / "env", "torch")
    package = next((tmp_path / "env" / "lib").glob("python*/site-packages")) / "torch"
    package.mkdir()
    if source is not None:
        (package / "__init__.py").write_text(source)
    said = doctor("torch", cwd=tmp_path, python=str(python))
    assert (said.code, said.one("torch")["state"]) == (1, "failed")
    assert words in said.one("torch")["seen"]


# -- Slurm, without a cluster ------------------------------------------------------------------------------------------


def test_a_munge_that_does_not_run_is_named(tmp_path: Path) -> None:
    need_program("munge", package="munge")
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nAuthType=auth/munge\n")
    setup = "mkdir -p /run/munge; mount -t tmpfs tmpfs /run/munge"
    said = doctor("munge", cwd=tmp_path, setup=setup, namespaces=["mount"], SLURM_CONF=tmp_path / "slurm.conf")
    assert (said.code, said.one("munge")["state"]) == (1, "failed")
    assert "start munged" in said.one("munge")["todo"]


def test_a_cluster_that_needs_no_munge_is_understood(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nAuthType=auth/slurm\n")
    said = doctor("munge", cwd=tmp_path, SLURM_CONF=tmp_path / "slurm.conf")
    assert (said.code, said.one("munge")["seen"]) == (0, "not used: AuthType=auth/slurm")


def test_slurm_without_its_commands_is_named(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=none\n")
    said = doctor("slurm", cwd=tmp_path, setup="PATH=$PWD", SLURM_CONF=tmp_path / "slurm.conf")
    assert (said.code, said.one("slurm")["seen"]) == (1, "Slurm's commands are not on the PATH")
