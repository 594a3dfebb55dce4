"""Checks carried out, compared with the node's baseline, and the verdict that is kept for prologs.

It uses ``checks`` and ``base``. Start reading at ``health_run``.
"""
