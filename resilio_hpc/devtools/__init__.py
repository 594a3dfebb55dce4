"""What developers and curious users run: a small real Slurm cluster, drills on it, and the demo.

Nothing of the product imports this room; only commands do.
"""
