"""What becomes durable, what the next round restores, and whether replicas are still the same."""
