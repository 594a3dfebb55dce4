"""Jobs, chains and users of Slurm, and a fake of slurmctld."""
