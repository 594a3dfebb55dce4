"""Drains with an owner: when a node may be drained or given back, and by whom.

Start reading at ``drain``.
"""
