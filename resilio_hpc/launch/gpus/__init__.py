"""The devices of a node: which exist, which fail, which are evicted.

Start reading at ``eviction``.
"""
