"""Who takes part: leader and voters, nodes that come, go, or are tested; and how training stops and the run ends."""
