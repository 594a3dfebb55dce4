"""Every mistake that we could think of: one or two lines that say what to do, exit code 2, and no heavy import.

All commands are tried in one fresh interpreter, so that what they import can be told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

HEAVY = ("torch", "numpy", "h5py", "zmq", "rich", "msgspec")

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}


@dataclass(frozen=True)
class Mistake:
    argv: str
    said: str
    environment: dict[str, str] = field(default_factory=dict)


MISTAKES = (
    # metrics
    Mistake("--metrics-port 70000 train.py", "--metrics-port: 70000 is no port, the highest is 65535"),
    Mistake("--metrics-port -1 train.py", "--metrics-port: -1 is not possible, it must be 0 or more"),
    Mistake("--metrics-port many train.py", "'many' is not a whole number"),
    Mistake("--metrics-address 0.0.0.0 train.py", "--metrics-address belongs to --metrics-port: add it"),
    Mistake("--metrics-interval 0 --metrics-port 0 train.py", "--metrics-interval 0 takes no samples"),
    Mistake("--metrics-interval -3 train.py", "--metrics-interval: -3 is not possible, it must be 0 or more"),
    Mistake("--metrics-textfile /no/such/folder train.py", "no directory that this user may write to"),
    Mistake("--gpu-headroom nan train.py", "'nan' is not a number"),
    # the program
    Mistake("", "no script given"),
    Mistake("--nproc-per-node 2", "no script given"),
    Mistake("tran.py", "did you mean train.py?"),
    Mistake("nowhere.py", "does not exist in"),
    Mistake("deep.py", "did you mean scripts/deep.py?"),
    Mistake("/no/such/train.py", "'/no/such/train.py' does not exist"),
    Mistake("scripts", "is a directory"),
    Mistake("'train.py '", "white space"),
    Mistake("'train.py\r'", "white space"),
    Mistake("''", "the script's name is empty"),
    Mistake("'$SCRIPT'", "the shell did not expand it"),
    Mistake("python train.py", "leave 'python' out (resilio-launch train.py)"),
    Mistake("python3.11 -u train.py", "leave 'python3.11' out (resilio-launch train.py)"),
    Mistake("srun train.py", "leave 'srun' out"),
    Mistake("torchrun --nproc-per-node 8 train.py", "leave 'torchrun' out (resilio-launch train.py)"),
    Mistake("accelerate launch --num_processes 8 train.py", "leave 'accelerate' out (resilio-launch train.py)"),
    Mistake("python -m torch.distributed.run --nproc-per-node 2 train.py", "out (resilio-launch train.py)"),
    Mistake("python -m package.train --lr 1", "leave 'python' out (resilio-launch -m package.train)"),
    Mistake("scripts.deep", "to run a module, write -m scripts.deep"),
    Mistake("unfinished.py", "unfinished.py, line 3: '(' was never closed\n    print("),
    Mistake("python2.py", "python2.py, line 1: Missing parentheses"),
    Mistake("latin1.py", "latin1.py"),
    Mistake("nul.py", "null bytes"),
    Mistake("job.sh", "add --no-python"),
    Mistake("elf", "add --no-python"),
    Mistake("loop.py", "loop.py is a link to nowhere (loop.py)"),
    Mistake("fifo", "is not a file"),
    Mistake(f"{'x' * 300}.py", "File name too long"),
    # modules and commands
    Mistake("-m nowhere", "no module named 'nowhere'"),
    Mistake("-m trian", "did you mean train?"),
    Mistake("-m pkg.mian", "did you mean pkg.main?"),
    Mistake("-m pkg", "without __main__"),
    Mistake("-m train.main", "train is a module, not a package"),
    Mistake("-m scripts/deep.py", "named like scripts.deep"),
    Mistake("-m train.py", "to run the file leave -m out"),
    Mistake("-m pkg.broken", "broken.py, line 1: "),
    Mistake("-m a-b", "is not the name of a module"),
    Mistake("-m --no-python train", "exclude each other"),
    Mistake("--no-python no-such-command", "was not found on PATH"),
    Mistake("--no-python job.sh", "the file in this directory is ./job.sh"),
    Mistake("--no-python ./train.py", "chmod +x ./train.py"),
    Mistake("--no-python ./scripts", "is a directory"),
    # flags
    Mistake("--nproc-pernode 2 train.py", "unknown flag --nproc-pernode: did you mean --nproc-per-node?"),
    Mistake("--nproc_pernode=2 train.py", "did you mean --nproc_per_node?"),
    Mistake("-nproc-per-node 2 train.py", "did you mean --nproc-per-node?"),
    Mistake("–nproc-per-node 2 train.py", "begins with a long dash"),
    Mistake("--max-retries 2 train.py", "did you mean --max-restarts?"),
    Mistake("--lr 0.1 train.py", "the script's own flags go after the script"),
    Mistake("--nprocs 2 train.py", "unknown flag --nprocs: did you mean --nproc-per-node?"),
    Mistake("--nproc 2 train.py", "unknown flag --nproc: did you mean --nproc-per-node?"),
    Mistake("--bogus", "unknown flag --bogus"),
    Mistake("-x train.py", "unknown flag -x"),
    Mistake("--run train.py", "unknown flag --run: did you mean --run-dir?"),
    Mistake("--standalone=1 train.py", "--standalone: ignored explicit argument '1'"),
    Mistake("--tee", "--tee: needs a value"),
    Mistake("--nproc-per-node = 2 train.py", "'=' is neither a whole number"),
    Mistake("--start-method thread train.py", "--start-method: invalid choice: 'thread'"),
    Mistake("--cpu-bind all train.py", "--cpu-bind: invalid choice: 'all'"),
    # ranks and nodes
    Mistake("--nproc-per-node two train.py", "'two' is neither a whole number nor one of auto, gpu, cpu, xpu"),
    Mistake("--nproc-per-node 0 train.py", "a node needs at least one rank"),
    Mistake("--nproc-per-node -1 train.py", "a node needs at least one rank"),
    Mistake("--nproc-per-node train.py", "train.py was taken as the value of --nproc-per-node"),
    Mistake("--nproc-per-node gpu train.py", "no GPU is visible here", {"CUDA_VISIBLE_DEVICES": ""}),
    Mistake("--nproc-per-node 100000000 train.py", "GiB free"),
    Mistake("--virtual-local-rank train.py", "no GPU is visible here", {"CUDA_VISIBLE_DEVICES": ""}),
    Mistake("--local-ranks-filter 0,2 --nproc-per-node 2 train.py", "there is no local rank 2"),
    Mistake("--local-ranks-filter a train.py", "is not a list of local ranks"),
    Mistake("--nnodes many train.py", "'many' is neither a number of nodes (4) nor a range"),
    Mistake("--nnodes 1:2:3 train.py", "neither a number of nodes"),
    Mistake("--nnodes 0 train.py", "at least one node"),
    Mistake("--nnodes 3:2 train.py", "MIN not above MAX"),
    Mistake("--nnodes -2 train.py", "neither a number of nodes"),
    Mistake("--nnodes 2 train.py", "without Slurm there is 1 node; submit with sbatch --nodes 2"),
    Mistake("--nnodes 3 train.py", "the allocation has 2 nodes; submit with sbatch --nodes 3", SLURM),
    Mistake("--nnodes 2 --spares 1 train.py", "need 3 nodes: the allocation has 2", SLURM),
    Mistake("--spares 2 train.py", "leave no node to train on: the allocation has 2", SLURM),
    Mistake("--standalone --nnodes 2 train.py", "--standalone allows 1 node", SLURM),
    Mistake("--nnodes 1 --node-unit 2 train.py", "no multiple of --node-unit 2", SLURM),
    Mistake("--spares -1 train.py", "--spares: -1 is not possible, it must be 0 or more"),
    Mistake("--node-unit 0 train.py", "it must be 1 or more"),
    # limits
    Mistake("--max-restarts -1 train.py", "--max-restarts: -1 is not possible"),
    Mistake("--max-restarts 1.5 train.py", "'1.5' is not a whole number"),
    Mistake("--heartbeat-timeout 0 train.py", "it must be above 0"),
    Mistake("--heartbeat-timeout nan train.py", "'nan' is not a number"),
    Mistake("--heartbeat-timeout 5s train.py", "'5s' is not a number"),
    Mistake("--start-timeout inf train.py", "'inf' is not a number"),
    Mistake("--join-timeout -3 train.py", "it must be 0 or more"),
    Mistake("--keep-checkpoints 0 train.py", "it must be 1 or more"),
    Mistake("--keep-every 0 train.py", "--keep-every: 0 is not possible, it must be 1 or more"),
    Mistake("--keep-hours 0 train.py", "--keep-hours: 0 is not possible, it must be above 0"),
    Mistake("--keep-gb -2.5 train.py", "--keep-gb: -2.5 is not possible, it must be above 0"),
    Mistake("--checkpoint-gb-per-s 0 train.py", "--checkpoint-gb-per-s: 0 is not possible, it must be above 0"),
    Mistake("--keep-gb 1TB train.py", "--keep-gb: '1TB' is not a number"),
    Mistake("--chain-max 0 train.py", "it must be 1 or more"),
    Mistake("--signals-to-handle SIGTRM train.py", "no signal is named 'SIGTRM'; SIGTERM?"),
    Mistake("--signals-to-handle SIGKILL train.py", "cannot be handled"),
    # files and output
    Mistake("--run-dir train.py/x train.py", "train.py is a file, not a directory"),
    Mistake("--run-dir '' train.py", "--run-dir is empty"),
    Mistake("--run-dir nowhere-link train.py", "is a link to nowhere"),
    Mistake("--run-dir loop.py/x train.py", "--run-dir"),
    Mistake("--log-dir train.py train.py", "--log-dir"),
    Mistake("--json train.py", "--json belongs to --dry-run"),
    Mistake("--view --tee 3 train.py", "choose one"),
    Mistake("--mode watch train.py", "--mode: invalid choice: 'watch'"),
    Mistake("--notify '' train.py", "--notify is empty"),
    Mistake("--notify ftp://h/x train.py", "ftp:// is not supported"),
    Mistake("--notify no-such-command train.py", "'no-such-command' was not found"),
    Mistake("--notify @nowhere train.py", "--notify @nowhere: No such file"),
    Mistake("--tee 4 train.py", "--tee: '4' is neither 0 (none)"),
    Mistake("--redirects 0:9 train.py", "--redirects: '0:9' is neither"),
    Mistake("-r out train.py", "--redirects: 'out' is neither"),
    Mistake("--rdzv-conf timeout train.py", "is not of the form KEY=VALUE"),
    Mistake("--rdzv-conf join_timeout=soon train.py", "is not a number of seconds"),
    # environment
    Mistake("train.py", "PET_MAX_RESTARTS in the environment: 'x' is not a whole number", {"PET_MAX_RESTARTS": "x"}),
    Mistake("train.py", "PET_STANDALONE='true' in the environment: write 1 or 0", {"PET_STANDALONE": "true"}),
    Mistake("train.py", "PET_START_METHOD='x' in the environment", {"PET_START_METHOD": "x"}),
    Mistake("train.py", "'many' is neither a number of nodes", {"PET_NNODES": "many"}),
    Mistake("train.py", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT='x'", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}),
    Mistake("train.py", "command '/no/python' was not found", {"PYTHON_EXEC": "/no/python"}),
    Mistake("train.py", "RESILIO_LOCAL_NODES='x'", {"RESILIO_LOCAL_NODES": "x"}),
)

DRIVER = """
import contextlib, io, json, os, shlex, sys
from resilio_hpc.cli.resilio_launch import main
answers = []
plain = dict(os.environ)
for argv, environment in json.load(sys.stdin):
    os.environ.clear(); os.environ.update(plain | environment)
    said, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        code = main(shlex.split(argv))
    answers.append([code, said.getvalue(), out.getvalue()])
print(json.dumps({"answers": answers, "modules": sorted(sys.modules)}))
"""


def clean_environment() -> dict[str, str]:
    """This process's environment without what would change a launch."""
    return scrubbed("PYTHON_EXEC")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a user's folder, with 'quotes'")
    files = {
        "train.py": b"import torch\n",
        "scripts/deep.py": b"",
        "unfinished.py": b"import torch\n\nprint(1\n",
        "python2.py": b"print 'hello'\n",
        "latin1.py": b"name = '\xe9'\n",
        "nul.py": b"a = 1\0\n",
        "job.sh": b"#!/bin/sh\nexit 0\n",
        "elf": b"\x7fELF\x02",
        "pkg/__init__.py": b"raise SystemExit('a check must not import this')\n",
        "pkg/main.py": b"",
        "pkg/broken.py": b"def f(:\n",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (folder / "nowhere-link").symlink_to("nowhere-at-all")
    (folder / "loop.py").symlink_to("loop.py")
    os.mkfifo(folder / "fifo")
    return folder


@pytest.fixture(scope="module")
def tried(folder: Path) -> dict[str, list]:
    """Every mistake, made one after the other in one interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([[mistake.argv, mistake.environment] for mistake in MISTAKES]),
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[f"{m.argv or 'nothing'}" for m in MISTAKES])
def test_a_mistake_is_answered_in_two_lines_that_name_it(tried: dict[str, list], number: int) -> None:
    code, said, out = tried["answers"][number]
    assert MISTAKES[number].said in said
    assert said.startswith("resilio-launch: error: ")
    assert len(said.splitlines()) <= 2
    assert (code, out) == (2, "")


def test_no_mistake_costs_a_heavy_import(tried: dict[str, list]) -> None:
    assert not [name for name in tried["modules"] if name in HEAVY]


def test_a_mistake_ends_the_process_with_code_2_and_creates_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "tran.py"],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "resilio-launch: error: script 'tran.py' does not exist: did you mean train.py?\n"
    assert sorted(folder.rglob("*")) == before
