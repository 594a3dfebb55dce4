"""resilio_hpc: keeps large training and MPI jobs making progress on Slurm clusters, whatever breaks."""

__version__ = "0.1.0"
