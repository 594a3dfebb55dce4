"""What a layout costs in time and memory, from the model and the machine alone.

Start reading at ``cost``.
"""
