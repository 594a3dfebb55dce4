"""The devices of a node: which there are, which fail, which are left out.

Start reading at ``eviction``.
"""
