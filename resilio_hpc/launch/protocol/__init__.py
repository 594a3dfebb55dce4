"""What agents and the controller send to each other, and the plain rules on it: quorum, root cause, leases.

Data and pure functions. Start reading at ``messages``.
"""
