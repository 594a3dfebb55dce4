"""What every other room of node health uses: checks as data, the node's files, killable children, users' reports.

It uses only ``core``. Start reading at ``check``.
"""
