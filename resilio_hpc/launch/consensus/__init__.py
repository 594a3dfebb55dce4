"""Which agent leads: leases, elections and votes. Pure but for ``connections``.

Start reading at ``follower``.
"""
