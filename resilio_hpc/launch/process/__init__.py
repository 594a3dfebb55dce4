"""Processes of this machine: their tree, how helpers are started, and output that never blocks.

It knows nothing of runs. Start reading at ``process_tree``.
"""
