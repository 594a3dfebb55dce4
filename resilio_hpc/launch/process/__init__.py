"""Processes of this machine: their tree, how ours are started, and output that never blocks.

Knows nothing of runs. Start reading at ``process_tree``.
"""
