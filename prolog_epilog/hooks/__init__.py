"""The scripts that Slurm runs around a job (``*.sh``), their writer for a site, and the work of the epilog.

It uses ``run`` and ``base``. Start reading at ``hook_files``.
"""
