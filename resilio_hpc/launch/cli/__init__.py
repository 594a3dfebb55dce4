"""The command line of ``resilio-launch``: options, their checks, and the dry run. It starts nothing.

May use the rooms that an option names, for its check. Start reading at ``option_table``.
"""
