"""For developers and curious users: a small real Slurm cluster, and the demo on it.

No other room of the product imports this one; only commands do.
"""
