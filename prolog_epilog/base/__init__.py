"""What every other room stands on: checks as data, the node's files, killable children, users' reports.

It uses only ``core``. Start reading at ``check``.
"""
