"""What is known of the run, what follows from it, and what the controller's parts say to each other.

Start reading at ``run_state``.
"""
