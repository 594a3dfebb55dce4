"""Submits a training program as a Slurm job from Python, through submitit, and waits for its end.

python examples/submit_with_submitit.py --nodes 2 --ranks-per-node 2 examples/train_gpt.py --steps 200
"""

import argparse
import sys
from pathlib import Path

import submitit

SURVIVE = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]  # else srun ends all tasks when one node or task is lost


def launch(arguments: list[str]) -> int:
    """Runs as the only task of each node; the tasks find each other."""
    from resilio_hpc.cli import resilio_launch

    return resilio_launch.main(arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", default="gpu")
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--cpus-per-node", type=int, default=1, help="the only task of a node gets them all")
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("submitit"), help="on the shared file system")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the script and its arguments")
    args = parser.parse_args()

    executor = submitit.AutoExecutor(folder=args.folder, cluster="slurm")
    executor.update_parameters(
        name="train",
        nodes=args.nodes,
        tasks_per_node=1,
        cpus_per_task=args.cpus_per_node,
        timeout_min=args.minutes,
        slurm_srun_args=SURVIVE,
        slurm_additional_parameters={"no_kill": True},
        **({"gpus_per_node": args.gpus_per_node} if args.gpus_per_node else {}),
    )
    flags = [f"--nproc-per-node={args.ranks_per_node}", f"--run-dir={args.folder.absolute()}/run"]
    job = executor.submit(launch, [*flags, *args.program])
    print(f"job {job.job_id}; its output: {job.paths.stderr}", flush=True)
    codes = job.results()  # one exit code per node
    print(f"exit codes {codes}; everything about the run: resilio status {args.folder}/run")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
