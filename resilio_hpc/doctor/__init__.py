"""``resilio doctor``: what works on this machine and why not.

``registry`` has a line for each check; ``examine`` runs them, each in a child that may hang; ``report`` says the
result. Start reading at ``finding``.
"""
