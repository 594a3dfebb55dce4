"""Drains with an owner: when a node may be drained or undrained, and by whom.

Start reading at ``drain``.
"""
