"""Slurm's commands and their answers, for every series that is supported. The one place that starts them.

Start reading at ``client`` and ``commands``.
"""
