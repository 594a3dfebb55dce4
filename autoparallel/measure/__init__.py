"""Measurements of a cluster and of runs, and predictions fitted to them.

Start reading at ``predict``.
"""
