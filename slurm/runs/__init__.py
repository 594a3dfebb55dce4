"""Where runs lie, and which run a word of the user names: a directory, a job's number, an id or its beginning.

Start reading at ``run_names``.
"""
