"""What a node and its ranks use, and count: sampled by one process per node, in one vendor-neutral schema."""
