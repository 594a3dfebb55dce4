"""One process per job: starts the agents, restarts them, and writes how the run ended.

It uses ``chain`` for the jobs before and after this one, and ``allocation`` for the places of agents. It decides
nothing about ranks. Start reading at ``supervisor``.
"""
