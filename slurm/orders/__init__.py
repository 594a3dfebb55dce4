"""Orders to Slurm that more than one room gives: changing a pending job, finding a run's job, the audit log.

Start reading at ``reshape``.
"""
