"""A rank's state in shared memory, as a copy that training does not touch.

Start reading at ``arena`` and ``snapshot``.
"""
