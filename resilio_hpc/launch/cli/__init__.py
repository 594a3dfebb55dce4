"""The command line of ``resilio-launch``: options, their checks, and the dry run. It starts nothing.

It may use the rooms that an option names, for its check. Start reading at ``option_table``.
"""
