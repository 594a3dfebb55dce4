"""Snapshots of this node's ranks and of other nodes', in memory and on the disk: who saves, copies, serves them."""
