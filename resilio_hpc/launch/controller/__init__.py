"""The decisions of a run: rounds, failures, checkpoints, stops, and its end. Pure but for ``host``.

One agent hosts the controller; ``consensus`` says which. Nothing here knows how agents carry out an order. Start
reading at ``controller``.
"""
