"""The jobs of a run, one after the other: which job goes on, from which step, on which nodes, and what is closed.

Start reading at ``chaining``.
"""
