"""Nodes, devices, rings and formats of checkpoint tests, and the programs that they run."""
