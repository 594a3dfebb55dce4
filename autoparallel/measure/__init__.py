"""Measurements of a cluster and of runs, and predictions that are fitted to them.

Start reading at ``predict``.
"""
