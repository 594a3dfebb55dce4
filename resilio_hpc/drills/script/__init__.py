"""The training script of drills, and the ways in which it fails, hangs or becomes slow. Starts at ``counting``."""
