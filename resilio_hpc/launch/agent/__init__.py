"""One process per node: owns the node's ranks, its snapshots, and its connection to the controller.

``agent`` is the loop with its sockets, ``local_services`` the children on its node; ``agent_core`` and ``node_ranks``
decide, and are pure. Start reading at ``agent_core``.
"""
