"""A cluster in virtual time that runs the real decisions of agents and controllers, to break them on purpose.

``world``: time, network, run directory, faults. ``agent``: one agent process and its controller. ``ranks``: training.
Messages arrive in order after a fixed latency and the schedule has no randomness; a seeded network belongs in
``World.deliver``.
"""
