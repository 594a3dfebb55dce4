"""How the processes of a job agree on a save or a restore: through their agent, or among themselves.

Start reading at ``coordinator``.
"""
