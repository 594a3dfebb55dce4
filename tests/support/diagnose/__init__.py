"""Nodes and probes with planted faults."""
