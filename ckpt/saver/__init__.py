"""The process that writes snapshots to disk, beside training.

Start reading at ``saver``.
"""
