#!/bin/sh
# What needs a GPU, on a machine without network and without Slurm: gpu_check.sh FOLDER, for logs and figures.
# PYTHON (default python3) has torch with CUDA, pytest, and the packages of setup.cfg.
set -u
cd "$(dirname "$0")/.."
folder=${1:?where logs and figures go}
python=${PYTHON:-python3}
mkdir -p "$folder"
status=0
step() { # NAME COMMAND…: its output goes into a log and to the end of this script's
    name=$1
    shift
    echo "== $name"
    "$@" >"$folder/$name.log" 2>&1 || { status=1; echo "$name failed:"; }
    tail -n 15 "$folder/$name.log"
}
step machine "$python" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0), torch.cuda.nccl.version())'
step build "$python" setup.py -q build_ext --inplace
step tests "$python" -m pytest -q -s -m gpu -p no:cacheprovider tests
for benchmark in checkpoint_gpu planner_gpu; do
    step "$benchmark" env PYTHONPATH=".:benchmarks${PYTHONPATH:+:$PYTHONPATH}" "$python" "benchmarks/$benchmark.py"
done
step call_costs env PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" "$python" benchmarks/overhead.py --pairs 0
exit $status
