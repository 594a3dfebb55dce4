"""The checks, beside their tables (``*.toml``, ``xid.csv``): a module reads one thing of the node and judges it.

They use ``base``; ``slurm_node`` also asks Slurm. Start reading at ``registry``.
"""
