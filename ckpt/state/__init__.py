"""A training state as a tree of tensors and values, and parts of global tensors.

It knows no files. Start reading at ``tree``.
"""
