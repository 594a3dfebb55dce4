"""What a run leaves in its run directory and on its nodes, and how it is read and written without blocking.

Start reading at ``run_directory``.
"""
