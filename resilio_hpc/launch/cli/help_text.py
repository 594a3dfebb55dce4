"""The text of ``resilio-launch --help`` around the flags."""

from __future__ import annotations

USAGE = "resilio-launch [FLAGS] SCRIPT|MODULE|COMMAND [ARGUMENTS …]"

DESCRIPTION = """Run a training program on every node of a Slurm allocation (or on this machine) and keep it making
progress: lost ranks and nodes are replaced without requeueing the job. Takes torchrun's command line."""

EXAMPLES = """examples:
  in a batch script (sbatch -N 4 --gpus-per-node 8; no srun: agents are started on every node):
      resilio-launch --nproc-per-node gpu --chain train.py --config large.yaml
  in an allocation of 5 nodes, one of them a spare, going on with as few as 2:
      resilio-launch --nnodes 2:4 --spares 1 --nproc-per-node 8 train.py
  in a job of its own, to add its nodes to a run that lost some:
      resilio-launch --join /shared/runs/large
  on this machine:
      resilio-launch --nproc-per-node 2 train.py
  tell a chat's webhook (its URL, which is a secret, is the file's only line) and a command of yours:
      resilio-launch --notify @$HOME/.notify-url --notify 'logger -t training' train.py
  see what would be done:
      resilio-launch --dry-run --nproc-per-node 2 train.py

exit codes:
  0 completed, or a next job of the chain carries on; 75 stopped and saved, to be started again; 1 gave up;
  143, 130 told to end; 2 a mistake in the command line; --mode observe and checkpoint: the first failed rank's
"""
