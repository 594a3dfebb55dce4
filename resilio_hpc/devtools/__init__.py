"""What developers and curious users run: a small real Slurm cluster, and the demo on it.

Nothing of the product imports this room; only commands do.
"""
