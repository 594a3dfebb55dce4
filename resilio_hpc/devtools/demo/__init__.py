"""The demo: a real training job on a real Slurm survives faults and ends with the same bits."""
