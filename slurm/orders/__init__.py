"""Orders to Slurm that several rooms give: changing a pending job, the audit log.

Start reading at ``reshape``.
"""
