"""New jobs: templates, their checks, sbatch, and submitit's executor.

Start reading at ``template`` and ``submission``.
"""
