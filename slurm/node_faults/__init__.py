"""Faults of nodes, remembered across jobs: a ledger with decay, and what follows from it in Slurm (RES-22)."""
