"""A fake NVML, trees of nodes, and the cases of health checks."""
