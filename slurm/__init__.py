"""Slurm access: what allocation we are in, and bounded commands to ask and tell Slurm."""
