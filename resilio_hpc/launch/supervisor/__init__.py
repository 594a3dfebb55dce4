"""One process per job: starts the agents, starts them again, and says how the run ended.

Uses ``chain`` for what came before and comes after this job, ``allocation`` for where agents run. It decides nothing
about ranks. Start reading at ``supervisor``.
"""
