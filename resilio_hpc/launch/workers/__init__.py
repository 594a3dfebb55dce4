"""The ranks of a node: how they are started, watched, stopped, and what they say.

Knows the agent only by the protocols of ``rank_owner``. Start reading at ``local_ranks``.
"""
