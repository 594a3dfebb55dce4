"""Faults on a real cluster, one after the other, each with what must hold afterwards.

Start reading at ``drill``.
"""
