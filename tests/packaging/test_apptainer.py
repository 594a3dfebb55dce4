"""The definition for Apptainer is built by Apptainer, and ranks run in what it makes.

As container-apptainer.sbatch has it: agents are outside, each rank is one ``apptainer exec``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.devtools.devcluster.image import host_mirror
from tests.support.checkout import copy_of_checkout
from tests.support.environments import ROOT
from tests.support.requirements import need_mounts
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow
INSTALLED = ROOT / ".setup" / "apptainer"
DEFINITION = ROOT / "packaging" / "apptainer" / "resilio.def"
PATIENCE_OF_A_BUILD_S = 900.0

# In a mount namespace whose root is that of Apptainer. The build has a user namespace, too: it asks for all
# capabilities, of which the root of a virtual machine may lack some.
INSIDE = """
set -eu
root=$1 work=$2
mount --bind "$root" "$root"
mkdir -p "$root/work" "$root/old"
mount --bind "$work" "$root/work"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
cd "$root" && pivot_root . old && umount -l /old && cd /work
export HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/tmp
unshare --user --map-root-user --map-auto --mount --fork --kill-child apptainer build \\
    --bind /work/ca.crt:/etc/ssl/certs/ca-certificates.crt --build-arg "WHEEL=$(ls /work/*.whl)" \\
    --build-arg PIP_OPTIONS=--cert=/etc/ssl/certs/ca-certificates.crt resilio.sif resilio.def
apptainer run resilio.sif --version
python3 -m venv outside
outside/bin/pip install -q --no-index --find-links wheels resilio_hpc
mkdir run
outside/bin/resilio-launch --run-dir run --nproc-per-node 2 --no-python \\
    apptainer exec --nv --bind "$PWD,$PWD/run,/tmp,/dev/shm" --pwd "$PWD" resilio.sif python train.py
apptainer exec --bind /work --pwd /work resilio.sif resilio ckpt verify run
"""
# Rank 1 is killed when a step is committed.
TRAIN = """
import os, pathlib, signal, sys, time, numpy
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer
run = train.attach()
state = {"weights": numpy.zeros(1000)}
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
restored = checkpoint.restore(state)
for step in run.steps(restored[0] if restored else 0, 12, save=checkpoint.saver(state), every=3):
    state["weights"] += 1
    if step == 7 and os.environ["RANK"] == "1" and os.environ["RESILIO_ROUND"] == "0":
        while not list(pathlib.Path(run.checkpoint_dir).glob("step-*")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
began = "begin" if restored is None else "checkpoint"
print("rank", os.environ["RANK"], "has", state["weights"][0], "from the", began, "in", sys.prefix, flush=True)
"""


def run(*argv: str | Path, patience_s: float = PATIENCE_S) -> str:
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=patience_s, cwd="/")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def with_base(text: str) -> str:
    """The definition on a base system that is there: debootstrap makes devices, which a user namespace forbids."""
    header, rest = text.split("\n%arguments\n")
    assert "Bootstrap: debootstrap\n" in header
    unpack = '%setup\n    tar -C "$APPTAINER_ROOTFS" -xf /work/base.tar\n'
    return f"Bootstrap: scratch\n\n{unpack}\n%arguments\n{rest}"


def for_outside(work: Path) -> None:
    """The packages of the launcher outside of the container, for the Python of Apptainer's root."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = run("chroot", INSTALLED, "python3", "-c", ask).split()[-1]
    (wheel,) = work.glob("*.whl")
    argv = [sys.executable, "-m", "pip", "download", "-q", "--python-version", version, "--only-binary=:all:"]
    done = subprocess.run([*argv, "-d", str(work / "wheels"), str(wheel)], capture_output=True, timeout=PATIENCE_S)
    if done.returncode != 0:
        pytest.skip(f"packages for Python {version} cannot be had here")


def test_ranks_train_in_a_container_that_the_definition_makes(tmp_path: Path) -> None:
    need_mounts()
    if not INSTALLED.is_dir():
        pytest.skip("needs Apptainer (scripts/site_tools.sh)")
    definition = DEFINITION.read_text()
    (suite,) = re.findall(r"^OSVersion: (\w+)$", definition, re.MULTILINE)
    (packages,) = re.findall(r"^Include: (.*)$", definition, re.MULTILINE)
    try:
        mirror = host_mirror()
    except UsageError as error:
        pytest.skip(str(error))
    include = f"--include={','.join(packages.split())}"
    run("debootstrap", "--variant=minbase", include, suite, tmp_path / "base", mirror, patience_s=PATIENCE_OF_A_BUILD_S)
    run("tar", "-C", tmp_path / "base", "--exclude=./dev/*", "-cf", tmp_path / "base.tar", ".")
    shutil.rmtree(tmp_path / "base")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        copy_of_checkout(tmp_path / "checkout"),
    )
    for_outside(tmp_path)
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", tmp_path / "ca.crt")
    (tmp_path / "resilio.def").write_text(with_base(definition))
    (tmp_path / "train.py").write_text(TRAIN)
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    words = [*isolated, "bash", "-c", INSIDE, "bash", INSTALLED, tmp_path]
    said = run(*words, patience_s=PATIENCE_OF_A_BUILD_S)
    assert re.search(r"^resilio 0\.1\.0$", said, re.MULTILINE)
    assert "recovered from a killed rank" in said
    for rank in (0, 1):
        assert f"[rank {rank}] rank {rank} has 12.0 from the checkpoint in /opt/resilio" in said
    assert (tmp_path / "run" / "verdict.json").exists()
