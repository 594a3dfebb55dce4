"""A process that is harmed at its I/O calls: the shim, and the programs that run under it."""
