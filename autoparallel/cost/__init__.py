"""Time and memory of a layout, from the model and the machine alone.

Start reading at ``cost``.
"""
