"""Ranks that need a PMI (``--mpi``): they are tasks of one srun step per round.

Start reading at ``ranks``.
"""
