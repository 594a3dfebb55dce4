"""Orders to Slurm that several rooms give: changing a pending job, finding a run's job, the audit log.

Start reading at ``reshape``.
"""
