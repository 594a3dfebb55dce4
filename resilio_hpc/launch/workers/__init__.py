"""The ranks of a node: how they are started, watched and stopped, and their messages.

It knows the agent only by the protocols of ``rank_owner``. Start reading at ``local_ranks``.
"""
