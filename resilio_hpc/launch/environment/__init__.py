"""Whether a node can run the program, and whether it is like the others (RES-3, NVX-4).

``facts`` gathers, in a process of its own that ``look`` starts. ``compare`` finds the nodes that differ.
"""
