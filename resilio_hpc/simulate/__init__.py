"""Goodput of runs that have not been: the product's own decisions, and the peers', on the same faults in virtual time.

Start reading at ``study``; ``virtual_run`` has the time, ``recovering_run`` what resilio decides.
"""
