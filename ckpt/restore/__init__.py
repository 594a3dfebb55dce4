"""Reads a state: from memory, a node's own disk, other nodes, or the shared directory; in any layout.

Start reading at ``restore``.
"""
