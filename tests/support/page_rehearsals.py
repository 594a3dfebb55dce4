"""What stands in for a reader's own cluster and files, page by page (`tests.support.pages`).

The login node's directory is /shared/NAME-OF-PAGE. ``$TRAIN`` is a script with steps and without torch.
"""

from __future__ import annotations

from tests.support.pages import ROOT, Rehearsal, blocks, quoted

_PLANNING = ROOT / "docs" / "planning.md"
_TOML = next(text for text in blocks(_PLANNING, "toml") if "[[pool]]" in text)
_ROWS = next(text for text in blocks(_PLANNING, "") if text.startswith("layers,"))

TRAIN = """
import sys, time
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer
run = train.attach()
state = {"weights": [0.0]}
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
restored = checkpoint.restore(state)
for step in run.steps(restored[0] if restored else 0, 40, save=checkpoint.saver(state), every=5):
    time.sleep(0.05)
"""
LONG = TRAIN.replace("40, save", "100000, save")

_SAVE_TWO = """
python - <<'END'
import numpy, torch
from resilio_hpc.ckpt import REPLICATED, Checkpointer
checkpoint = Checkpointer("checkpoints", keep_last=9, layout=REPLICATED)
model = {"weight": torch.rand(300, 400), "bias": torch.rand(300), "norm": {"bias": torch.rand(300)}}
for step, epoch in ((200, 2), (300, 3)):
    model["weight"][0, 0] = epoch
    checkpoint.save(step, {"model": model, "epoch": epoch, "noise": numpy.arange(4.0)}).wait()
END
"""
_FINISHED_RUN = "resilio-launch --nproc-per-node 1 --no-torch train.py >/dev/null 2>&1\n"
_WITH_TRAIN = quoted(TRAIN, "train.py")
_HDF5_TOOLS = "Debian's hdf5-tools"
_SURVIVAL = "--no-kill --kill-on-bad-exit=0 --wait=0"
_SUBMITTED = "resilio submit --template chained nodes=9 spares=1 time=12:00:00 -- train.py"

REHEARSALS = {
    "README": Rehearsal(
        on_host=True,
        swaps={r"(resilio devcluster \w+)": r"\1 --name $CLUSTER"},
        elsewhere={
            "python3 -m venv": "tests/test_wheel.py",
            ".venv/bin/resilio doctor": "docs/doctor.md's commands",
            "sbatch --wait job-0.sh": "docs/launching.md's, which is the same",
            "make demo": "tests/demo",
            "make test": "what runs this",
            "srun --no-kill": "docs/launching.md's commands",
        },
    ),
    "adoption": Rehearsal(
        prepare=_WITH_TRAIN + "export HOME=$PWD; echo http://127.0.0.1:9/ > .notify-url\n",
        swaps={"--nproc-per-node gpu": "--nproc-per-node 1 --no-torch"},
    ),
    "alerts": Rehearsal(
        prepare=_WITH_TRAIN + "resilio-launch --run-dir run --nproc-per-node 1 --no-torch train.py\n",
        swaps={r"\bRUN\b": "run"},
    ),
    "chains": Rehearsal(
        prepare=quoted(LONG, "train.py")
        + """
mkdir run
cat > job.sh <<'END'
#!/bin/bash
#SBATCH --nodes=1 --no-kill --time=10 --exclusive
exec resilio-launch --run-dir run --nproc-per-node 1 --no-torch --chain train.py
END
job=$(sbatch --parsable job.sh)
wait_for committed run
""",
        swaps={r"\b12\b": "$job"},
        then={"resilio chain stop": 'wait_for sh -c "! squeue -h -j $job | grep ."'},
    ),
    "checking-nodes": Rehearsal(
        prepare="printf '#!/bin/sh\\nhostname\\n' | tee program > job.sh; chmod +x program\n",
        swaps={
            r"gpu\[001-016\]": "n[1-2]",
            r"check-nodes  +#": "check-nodes -w n[1-2] #",
            r"--exclude-file": "-w n[1-2] --exclude-file",
            r"--print good": "-w n[1-2] --print good",
            r"--local 4": "--local 2",
        },
        elsewhere={"resilio check-nodes --run": "tests/on_slurm/test_node_tests.py"},
    ),
    "checkpoints": Rehearsal(
        prepare=_WITH_TRAIN + _SAVE_TWO,
        swaps={"resilio-launch ": "resilio-launch --no-torch ", "/local/nvme": "/tmp/nvme"},
        codes={"resilio ckpt diff": 1},
        elsewhere={"h5ls": _HDF5_TOOLS, "h5dump": _HDF5_TOOLS},
    ),
    "devcluster": Rehearsal(
        on_host=True,
        swaps={r"(resilio devcluster \w+)": r"\1 --name $CLUSTER"},
    ),
    "diagnosis": Rehearsal(
        prepare="""
cat > slurm-4711.out <<'END'
[rank0]: step 100 loss 2.2 lr 0.1
[rank1]: step 100 loss 2.2 lr 0.1
[rank0]: step 110 loss 2.1 lr 0.1
[rank5]: RuntimeError: CUDA error: uncorrectable ECC error encountered
[rank3]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15734, OpType=ALLREDUCE) ran for 600037 ms
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
END
python - <<'END'
import json
call = {"process_group": ["0", ""], "collective_seq_id": 1, "profiling_name": "nccl:all_reduce"}
for rank, calls in enumerate([[call], []]):
    dump = {"comm_lib_version": "", "pg_config": {"0": {"ranks": "[0, 1]"}}, "entries": calls}
    open(f"nccl_trace_rank_{rank}", "w").write(json.dumps(dump))
END
echo 'NVRM: Xid (PCI:0000:07:00): 48, pid=4711, DBE (double bit error)' > dmesg-n3.txt
printf '{"id": "a", "lines": [{"text": "Disk quota exceeded"}]}\n' > cases.jsonl
echo 'raise KeyError("lr")' > wrong.py
printf '#!/bin/sh\nexec resilio-launch --nproc-per-node 1 --no-torch --max-restarts 0 wrong.py\n' > job.sh
job=$(sbatch --parsable job.sh)
wait_for test -s resilio-runs/$job/verdict.json
""",
        swaps={"/tmp/nccl": "nccl", r"diagnose 4711": "diagnose $job", "resilio-runs/4711": "resilio-runs/$job"},
    ),
    "doctor": Rehearsal(swaps={"/scratch/me/runs": "runs", "--local-checkpoints /local": "--local-checkpoints /tmp"}),
    "draining": Rehearsal(
        swaps={"n7": "n5"},
        then={"resilio undrain n[3-5]": "scontrol update nodename=n5 state=drain reason='Kill task failed'\n"},
    ),
    "drills": Rehearsal(
        prepare=quoted(LONG, "train.py")
        + """
mkdir run
cat > job.sh <<'END'
#!/bin/bash
#SBATCH --nodes=1 --no-kill --time=10 --exclusive
exec resilio-launch --run-dir run --nproc-per-node 1 --no-torch train.py
END
job=$(sbatch --parsable job.sh)
wait_for committed run
""",
        swaps={r"--run RUN$": "--run run --yes", r"--run RUN\b": "--run run", r"why RUN": "why run"},
        then={"resilio drill schedule rank-sigkill --weekly": "scancel $job"},
        elsewhere={
            "resilio drill run rank-sigkill node": "tests/on_slurm/test_drills.py",
            "resilio drill run --campaign": "tests/on_slurm/test_drills.py",
        },
    ),
    "faq": Rehearsal(),
    "frameworks": Rehearsal(elsewhere={"resilio-launch": "tests/frameworks"}),
    "hangs": Rehearsal(
        prepare=_WITH_TRAIN
        + "mkdir runs; resilio-launch --run-dir runs/large --nproc-per-node 1 --no-torch train.py >/dev/null 2>&1\n",
    ),
    "health": Rehearsal(
        swaps={"n17": "n3", "--compare DIR": "--compare /var/lib/resilio/baseline"},
    ),
    "launching": Rehearsal(
        prepare=_WITH_TRAIN + "touch large.yaml\n",
        swaps={
            "--nodes=9 --gpus-per-node=8": "--nodes=3 --gpus-per-node=2",
            "srun ": "srun --nodes=2 --gpus-per-node=2 ",
            "--nproc-per-node": "--no-torch --nproc-per-node",
        },
    ),
    "ledger": Rehearsal(
        prepare=_WITH_TRAIN + _FINISHED_RUN + "run=$(resilio runs | awk 'NR == 2 {print $1}'); : ${run:?}\n",
        swaps={r"\bRUN\b": "$run", "status 4e": "status ${run:0:4}"},
    ),
    "report": Rehearsal(
        prepare=_WITH_TRAIN + _FINISHED_RUN + "run=$(resilio runs | awk 'NR == 2 {print $1}'); : ${run:?}\n",
        swaps={r"\bRUN\b": "$run"},
    ),
    "simulate": Rehearsal(
        prepare=_WITH_TRAIN + _FINISHED_RUN + "run=$(resilio runs | awk 'NR == 2 {print $1}'); : ${run:?}\n",
        swaps={r"\bRUN\b": "$run"},
    ),
    "watching": Rehearsal(
        prepare=_WITH_TRAIN + _FINISHED_RUN + "run=$(resilio runs | awk 'NR == 2 {print $1}'); : ${run:?}\n",
        swaps={r"\bRUN\b": "$run"},
        codes={"resilio logs RUN --first-error": 1},
        elsewhere={"resilio view RUN --web": "serves until Ctrl-C; tests/cli/test_web_view.py"},
    ),
    "measurements": Rehearsal(
        elsewhere={
            "benchmarks/peers_setup.sh": "needs a package index; tests/benchmarks",
            ".venv/bin/python benchmarks/": "minutes; each benchmark's smallest run is in tests/benchmarks",
        },
    ),
    "metrics": Rehearsal(
        prepare=quoted(TRAIN.replace("40, save", "1000, save"), "train.py")
        + "resilio-launch --nproc-per-node 1 --no-torch --run-dir my-run train.py >/dev/null 2>&1 &\n"
        "wait_for eval 'resilio ledger my-run --event counters | grep -q before'\n"
        "wait_for test -e my-run/metrics/*.json\n",
        then={"resilio metrics my-run --token": "kill %1; wait"},
        elsewhere={"pip install": "needs a package index; tests/test_wheel.py"},
    ),
    "mpi": Rehearsal(
        prepare="printf 'from mpi4py import MPI\\nassert MPI.COMM_WORLD.size == 4\\n' > solver.py\n",
        swaps={"--nodes=5": "--nodes=3", "--nproc-per-node 64": "--nproc-per-node 2"},
    ),
    "node-faults": Rehearsal(
        prepare=_WITH_TRAIN
        + _FINISHED_RUN
        + "ln -s $(ls -d resilio-runs/*) learned\n"
        + "srun --nodelist=n3 install -d -m 1777 /var/spool/resilio/reports\n",  # what the node's daemon makes
        swaps={"n17": "n3", "--nodes 8 -p gpu": "--nodes 2 -p gpu", "resilio-runs/1234": "learned"},
    ),
    "object-store": Rehearsal(
        elsewhere=dict.fromkeys(["pip install", "resilio-launch", "resilio ckpt"], "tests/ckpt/objects")
    ),
    "planning": Rehearsal(
        prepare=quoted(_TOML, "cluster.toml")
        + quoted(_ROWS, "layouts.csv")
        + """
mkdir my-model
cat > my-model/config.json <<'END'
{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 688,
 "vocab_size": 1000, "max_position_embeddings": 512}
END
cat > train.py <<'END'
import torch
def example():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)), (torch.zeros(4, 8),)
def unet():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.SiLU()), (torch.zeros(4, 3, 8, 8),)
END
printf '#!/bin/bash\\necho "$@"\\n' > job.sh
python - layouts.csv <<'END' > measured.csv
import sys
head, *rows = open(sys.argv[1]).read().splitlines()
print(head + ",iter_time_s")
for row in rows + rows:
    print(row + ",40.0")
END
""",
        swaps={
            "--partition gpu --gpus 64 ": "--partition gpu --gpus 32 ",
            "--gpus 32-128": "--gpus 16-40",
            "--backend nccl --nodes 2 --ranks-per-node 8": "--backend gloo --nodes 2 --ranks-per-node 1 --seconds 1",
            "resilio plan profile --out": "resilio plan profile --device cpu --out",
            "--rows runs/runs.csv": "--rows measured.csv",
        },
        elsewhere={"resilio plan calibrate llama3-8b": "tests/cli/test_plan_measure.py"},
        codes={
            "resilio plan gpt3-175b --gpus 1024 --gpu a100 --global-batch 1536 --precision bf61": 2,
            "resilio plan gpt3-175b --gpus 1024 --gpu a100 --global-batch 1536 --precision fp8": 2,
            "resilio plan llama2-70b --gpus 16": 3,
            "resilio plan llama3-8b --gpus 12": 3,
            "resilio plan llama2-7b --gpus 8": 3,
            "resilio plan model llama3-8b --stages 16": 2,
        },
    ),
    "quickstart": Rehearsal(
        prepare=f"ln -s {ROOT}/examples examples\n",
        swaps={
            "CHECKOUT": str(ROOT),
            "status 1": "status $job",
            "pkill": "srun --overlap --jobid=$job --nodes=1 --ntasks=1 pkill",
            "sbatch first.sh": "sbatch --job-name first job-0.sh",
        },
        elsewhere={
            "python3 -m venv": "tests/test_wheel.py",
            "sbatch --wait job-0.sh": "the page's own sbatch",
            "export PATH=": "the commands are on the dev cluster's PATH",
        },
        then={
            "sbatch first.sh": """
job=$(squeue -h -n first -o %i)
wait_for committed resilio-runs/$job
""",
            "pkill": "wait_for grep -q 'recovered from a killed rank' first.txt; scancel $job\n",
        },
    ),
    "resizing": Rehearsal(
        prepare=quoted(LONG, "train.py")
        + """
cat > job.sh <<'END'
#!/bin/bash
#SBATCH --nodes=1 --no-kill --time=10 --exclusive --partition=gpu
exec resilio-launch --nnodes 1:3 --run-dir resilio-runs/1234 --nproc-per-node 1 --no-torch train.py
END
job=$(sbatch --parsable job.sh)
wait_for committed resilio-runs/1234
""",
        swaps={
            "nodes=4 min_nodes=2 max_nodes=16 -- ": "nodes=2 min_nodes=1 max_nodes=4 -- --no-torch ",
            "--watch 30 ": "--watch 1 ",
            "resilio-launch ": f"srun --nodes=2 --gpus-per-node=8 {_SURVIVAL} resilio-launch --no-torch ",
        },
        then={
            "resilio submit": "scancel --name train.py; scancel --state=PENDING -u root\n",
            "resilio resize resilio-runs/1234   ": "(sleep 5; scancel $job) &\n",
            "resilio resize resilio-runs/1234 --watch 30 --observe": "wait; scancel -u root\n" + _WITH_TRAIN,
        },
    ),
    "simulator": Rehearsal(on_host=True, swaps={"0 100000": "0 300"}),
    "site": Rehearsal(
        swaps={r"install  +#": "install $PWD  #", r"~/\.local": "$PWD"},
        elsewhere={
            "pip install": "tests/test_wheel.py",
            "spack ": "Spack",
            "eb ": "tests/packaging/test_easybuild.py",
            "apptainer build": "tests/packaging/test_apptainer.py",
        },
    ),
    "submitting": Rehearsal(
        prepare=_WITH_TRAIN + "touch large.yaml\n",
        swaps={"nodes=9": "nodes=3"},
        then={_SUBMITTED: "wait_for sh -c 'squeue -h | grep .'; scancel -u root\n"},
    ),
    "testing": Rehearsal(
        elsewhere={
            "make test": "what runs this",
            ".venv/bin/python -m pytest tests/ckpt": "a part of make test",
        },
    ),
}
