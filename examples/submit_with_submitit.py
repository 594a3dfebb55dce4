"""Submits a training program as a Slurm job from Python, through submitit, and waits for its end.

python examples/submit_with_submitit.py --nodes 2 --spares 1 --ranks-per-node 2 examples/train_gpt.py --steps 200
"""

import argparse
import sys
from pathlib import Path

import submitit


def train(program: list[str]) -> int:
    """Run in every rank, in every round, and return the rank."""
    import runpy

    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")
    return submitit.JobEnvironment().global_rank


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2, help="those that train")
    parser.add_argument("--spares", type=int, default=0, help="further ones, to take the place of a lost node")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--minutes", type=int, default=60, help="time limit of each job of the chain")
    parser.add_argument("--folder", type=Path, default=Path("submitit"), help="on the shared file system")
    parser.add_argument("--cluster", choices=("slurm", "local", "debug"), default="slurm")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the script and its arguments")
    args = parser.parse_args()

    executor = submitit.AutoExecutor(args.folder / "%j", cluster="resilio", resilio_cluster=args.cluster)
    executor.update_parameters(
        name="train",
        nodes=args.nodes,
        tasks_per_node=args.ranks_per_node,
        timeout_min=args.minutes,
        resilio_spares=args.spares,
        **({"gpus_per_node": args.gpus_per_node} if args.gpus_per_node else {}),
    )
    job = executor.submit(train, args.program)
    print(f"job {job.job_id}; its output: {job.paths.stdout}", flush=True)
    print(f"ranks {job.results()}; everything about the run: resilio status {job.paths.folder}/{job.job_id}_run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
