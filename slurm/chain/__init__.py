"""The jobs of a chain as Slurm sees them: names, dependencies, options of the next one.

Start reading at ``chain``.
"""
