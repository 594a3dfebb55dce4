"""What a launch was asked for: options, settings of an agent, the layout of ranks, Slurm's variables. Plain data.

Used by every room of the launcher. Start reading at ``options``.
"""
