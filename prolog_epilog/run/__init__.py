"""Runs checks, compares them with the node's baseline, and keeps the verdict for prologs.

It uses ``checks`` and ``base``. Start reading at ``health_run``.
"""
