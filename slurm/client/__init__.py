"""Slurm's commands and their answers, for every supported series. Only this room starts them.

Start reading at ``client`` and ``commands``.
"""
