"""The jobs of a run, one after the other: who goes on, from what, with which nodes, and what is closed.

Start reading at ``chaining``.
"""
