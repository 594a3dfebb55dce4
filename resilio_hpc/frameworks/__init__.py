"""Adapters for frameworks that own the training loop: import the module of yours. None is imported by anything else."""
