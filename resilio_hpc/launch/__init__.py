"""The launcher: keeps the ranks of a training or MPI program running on the nodes of a Slurm job.

``supervisor`` runs once per job and starts one ``agent`` per node. Agents start ranks (``workers``), elect a leader
(``consensus``), and the leader's ``controller`` decides. Start reading at ``supervisor`` and ``agent.agent``.
"""
