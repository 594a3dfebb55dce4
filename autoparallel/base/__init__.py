"""Parallel layouts, machines and software stacks as columns. The ground of the planner.

Start reading at ``layout``.
"""
