"""The decisions of a run: rounds, failures, checkpoints, stops, and its end. Pure, except ``host``.

One agent hosts the controller; ``consensus`` decides which. The controller does not know how agents carry out an order.
Start reading at ``controller``.
"""
