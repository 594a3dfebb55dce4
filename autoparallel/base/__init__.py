"""Parallel layouts, machines and software stacks as columns. The lowest room of the planner.

Start reading at ``layout``.
"""
