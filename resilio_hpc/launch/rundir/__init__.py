"""What a run writes to its run directory and its nodes, and how it is read and written without blocking.

Start reading at ``run_directory``.
"""
