"""The directory of committed steps: commit, fence, retention, verify, copy.

Start reading at ``checkpoint_index``.
"""
