"""Where agents run: the nodes of a job, the sruns that start agents on them, and what Slurm says of the job.

Start reading at ``placements``.
"""
