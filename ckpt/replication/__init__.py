"""Snapshots in the memory of other nodes, and tensors that are the same on all ranks.

Start reading at ``replicator``.
"""
