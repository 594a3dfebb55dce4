"""Searches for faults that break the control plane: the real code, in virtual time, from a seed.

``schedule``: what a seed means. ``world``: a virtual cluster with the ``network`` and ``storage`` of bad days and
clocks that disagree. ``faults``: what strikes. ``run``: one seed, from start to verdict. ``story``: what happened, in
lines. ``search``: many seeds. The invariants are the virtual cluster's own.

    python -m tests.support.simulator 4711        one seed, with its story
    python -m tests.support.simulator 0 10000     many seeds; the story of the first that fails
"""
