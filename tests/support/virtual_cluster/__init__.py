"""A cluster in virtual time that runs the real decisions of agents and controllers, to break them on purpose.

``world``: time and faults. ``agent``: one agent process, ``host``: the controller's body in it. ``network``,
``directory``: what lies between them. ``ranks``: training. ``invariants``: what must hold at every moment.
Here nothing is left to chance; ``simulator`` puts a seeded network and storage in the place of these.
"""
