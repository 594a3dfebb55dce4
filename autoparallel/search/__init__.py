"""Which shapes and layouts there are, and which is best.

Start reading at ``ranking``.
"""
