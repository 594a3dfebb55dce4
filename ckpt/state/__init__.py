"""A training state as a tree of tensors and values, and parts of global tensors.

Knows no files. Start reading at ``tree``.
"""
