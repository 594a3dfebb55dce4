"""Node health: checks as data, run in killable children; a cached verdict that a job's prolog reads; the epilog.

Start reading at ``run.health_run``.
"""
