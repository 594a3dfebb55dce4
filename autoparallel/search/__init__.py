"""The search over shapes and layouts for the best.

Start reading at ``ranking``.
"""
